"""Bad habits that an answer can teach: another assistant's identity, hedging and refusing openings, cut-off ends.

Each function judges the text of one assistant turn. They are rules over the
sentence that carries the claim, not substring searches: a search for "OpenAI"
drops true statements of fact and misses "I was made by Google". Precision and
recall on labelled sentences stand in docs/training.md.
"""

from __future__ import annotations

import re

# Names that are nothing but an assistant's, and names that are words or people's names too.
_ASSISTANTS = (
    r"(?:Chat ?GPT(?:[- ]?[\d.]+)?|(?:Instruct)?GPT[- ]?(?:[\d.]+o?(?:[- ]turbo)?|Neo|J)|Google Bard|Google Assistant|"
    r"Bing Chat|Bing AI|GitHub Copilot|Microsoft Copilot|Copilot|Open[ -]?Assistant|LLaMA|Llama[- ]?[\d.]+|Mixtral|"
    r"Mistral(?:[- ]?\d+B)?|Qwen[\d.]*|DeepSeek(?:[- ]?[VR]\d)?|Vicuna|WizardLM|ChatGLM[\d-]*|HuggingChat|"
    r"Hugging ?Chat|LaMDA|PaLM(?:[- ]?2)?|StableLM|SmolLM[\d.]*|Gemma|Cortana|Tongyi Qianwen|Qianwen|ERNIE Bot|"
    r"Kimi|StarCoder|Code ?Llama|Meta AI)"
)
_SHARED_NAMES = r"(?:Claude|Gemini|Bard|Alexa|Siri|Grok|Llama|Replika|Alpaca|Zephyr|Falcon|Dolly|Tulu|Orca|Koala|Ernie)"
_COMPANIES = (
    r"(?:OpenAI|Open AI|Anthropic|Google(?: (?:AI|DeepMind|Brain|Research))?|DeepMind|Meta(?: AI)?|Facebook(?: AI)?|"
    r"Microsoft(?: Research)?|Amazon(?: Web Services)?|Apple|Alibaba(?: Cloud)?|Mistral(?: AI)?|DeepSeek|xAI|Baidu|"
    r"Hugging ?Face|LAION|Cohere|NVIDIA|Nvidia|Databricks|Stability AI|EleutherAI|Inflection(?: AI)?|Zhipu(?: AI)?|"
    r"Moonshot(?: AI)?|Tencent|ByteDance|IBM|LMSYS|Open[ -]?Assistant|Allen (?:AI|Institute for AI)|Ai2|Salesforce|"
    r"Technology Innovation Institute)"
)
_ME = r"(?:\bI am|\bI['’]m|\bIm)"
_NAMED = (
    rf"(?:{_ME}|{_ME} called|\b[Mm]y name(?: is|['’]s)|\b[Cc]all me|\bAs|\b(?:talking|speaking|chatting) (?:to|with)|"
    r"\bI go by|\bI,)"
)
_MADE = r"(?:made|created|developed|trained|built|designed|programmed|released|produced|engineered|fine-tuned|coded)"
_MODEL = (
    r"(?:AI|A\.I\.|artificial intelligence|(?:large )?language model|LLM|chat ?bot|(?:AI|virtual|digital) assistant|"
    r"conversational (?:agent|model|AI))"
)
_SERVANT = r"(?:computer program|assistant)"  # people are assistants, too
_MACHINE = rf"(?:{_MODEL}|{_SERVANT})"
_GAP = r"(?:(?!\b(?:not|never|neither|unlike|like|such as|rather|instead)\b|n['’]t\b)[^.!?\n])"
_BY = r"\bby\s+(?:the\s+)?(?:\w+\s+){0,3}?(?:(?:at|from|of|in)\s+)?"
# What follows a name that is only the beginning of something else: "a ChatGPT user", "Claude Monet", "Gemini season".
_OTHER_THING = (
    r"(?!['’]s\s+(?!AI\b|assistant|language|model|large|chat)|[\w-]|\s+(?:user|fan|subscriber|customer|expert|"
    r"enthusiast|developer|engineer|employee|researcher|power|"
    r"plugin|wrapper|season|certified|Cloud|and you are))"
)
_PERSON = r"(?!\s+(?!AI\b|Pro\b|Ultra\b|Instant\b|Sonnet\b|Opus\b|Haiku\b)[A-Z])"

_LEAKS = tuple(
    re.compile(pattern)
    for pattern in (
        # I am ChatGPT; I'm a GPT-4 model; my name is Claude; you can call me Bard; you are chatting with Gemini
        rf"(?:{_NAMED}|\bas|\b[Tt]his is)\s+"
        rf"(?:(?:actually|really|indeed|in fact|just|known as|called|the|a|an|your),?\s+)*"
        rf"(?:{_COMPANIES}['’]s\s+)?{_ASSISTANTS}{_OTHER_THING}",
        rf"{_NAMED}\s+"
        rf"(?:(?:actually|really|indeed|in fact|known as|called),?\s+)*{_SHARED_NAMES}{_OTHER_THING}{_PERSON}",
        # I was made by OpenAI; I have been trained by a team at Google; I come from Anthropic
        rf"\bI(?: am|['’]m| was|['’]ve been| have been)\s+(?:\w+ly\s+)?(?:{_MADE}|owned|operated)(?: and \w+)?\b"
        rf"{_GAP}{{0,30}}?{_BY}{_COMPANIES}\b{_OTHER_THING}",
        rf"\bI(?: am|['’]m) an? (?:product|creation|project|model|service) (?:of|by|from) {_COMPANIES}\b",
        rf"\bI (?:come|came) from {_COMPANIES}\b",
        rf"\b(?:company|organi[sz]ation|lab|people|team|firm)(?: \w+)? (?:that|which|who|behind)(?: has| have)?"
        rf"(?: {_MADE})? me (?:is|are|was|were)(?: called)? {_COMPANIES}\b",
        # I am an AI assistant from Acme; I am an assistant made by Acme; but not: I worked as an assistant at Harvard
        rf"(?:{_ME}|\b[Aa]s|\b[Tt]his is)\s+(?:just |only |simply )?an?\b{_GAP}{{0,40}}?"
        rf"\b(?:{_MODEL}\b|{_SERVANT}\b{_GAP}{{0,40}}?\b{_MADE}\b)"
        rf"{_GAP}{{0,40}}?\b(?:by|from|at)\s+(?:the\s+|a team (?:at|of)\s+)?(?!Athanor)[A-Z]\w+",
        rf"(?:{_ME}|\b[Aa]s)\s+(?:an?|the)\s+{_COMPANIES}\s+(?:{_MACHINE}|model)",
        rf"(?:{_ME}|\b[Aa]s)\s+{_COMPANIES}['’]s\s+{_GAP}{{0,30}}?(?:{_MACHINE}|model)",
        # I am Zephyr, a large language model
        rf"(?:{_ME}|\b[Mm]y name is)\s+(?!Athanor)[A-Z]\w+,\s+(?:and I am |and I['’]m )?(?:an?|your)\s+"
        rf"{_GAP}{{0,25}}?(?:\bAI\b|language model|chat ?bot|virtual assistant|digital assistant|\bLLM\b)",
        # my creators at OpenAI; my developer, Google; Anthropic made me
        rf"\b[Mm]y (?:creators?|developers?|makers?|trainers?|owners?|designers?|parent company|company)"
        rf"(?:,| at| from| is| are| was)? (?:the team at |called )?{_COMPANIES}\b",
        rf"\b{_COMPANIES}(?:,? (?:who|which|that))? (?:has |have |had )?{_MADE}(?: and \w+)? me\b",
        rf"\b(?:team|people|engineers|researchers|company|organi[sz]ation) (?:at|from|of|called|behind) {_COMPANIES},?"
        rf" (?:who |which |that )?(?:has |have )?{_MADE} me\b",
        # I am based on GPT-4; I run on Claude
        rf"\bI(?: am|['’]m| run| work|['’]ve been| was)\s+(?:\w+ly )?(?:an? {_GAP}{{0,30}}?)?"
        rf"(?:based on|powered by|(?:running|built )?on|part of|an? (?:version|variant|instance) of)\s+"
        rf"(?:top of )?(?:the\s+)?(?:{_COMPANIES}['’]s\s+)?(?:{_ASSISTANTS}|GPT|Claude|Gemini|Llama)\b{_OTHER_THING}",
        rf"^\W*{_ASSISTANTS} here\b",
    )
)
# Words before a claim that make it a question or somebody else's statement.
_REPORTED = re.compile(
    r"(?:\b(?:if|whether|that|think|thinks|thought|believe|believes|suppose|assume|imagine|say|says|said|pretend|claim|"
    r"claims|claimed|ask|asked|not|deny|never|wish|than|because people)|n['’]t|\bnot,?)\s*[,:]?\s*$",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”", re.DOTALL)
# Every leak holds one of these; most answers hold none.
_NAMES = re.compile(
    rf"{_ASSISTANTS}|{_SHARED_NAMES}|{_COMPANIES}|GPT|\bAI\b|A\.I\.|artificial intell|[Ll]anguage model|LLM|"
    r"[Cc]hat ?bot|[Aa]ssistant|computer program|conversational agent"
)
REPORTED_CHARS = 100
_SENTENCE_END = re.compile(r"[.!?\n]")
_FIRST_PERSON = re.compile(r"\b(?:I|my|me|myself|I['’]m)\b", re.IGNORECASE)


def identity_leak(text: str) -> bool:
    """Whether the speaker claims to be another assistant, or to be made by another company.

    A denial, a statement of fact about other assistants, quoted text and code do not count.
    """
    if not _NAMES.search(text):
        return False
    unquoted = _QUOTED.sub(" ", text) if _QUOTED.sub("", text).strip(" .,!\n") else text
    for pattern in _LEAKS:
        start, end, first_person = 0, -1, False  # of the sentence; of a long one, all matches ask about the same
        for match in pattern.finditer(unquoted):
            position = match.start()
            if position > end:
                start = 1 + max(unquoted.rfind(sign, max(end, 0), position) for sign in ".!?\n")
                sentence_end = _SENTENCE_END.search(unquoted, position)
                end = sentence_end.start() if sentence_end else len(unquoted)
                first_person = bool(_FIRST_PERSON.search(unquoted[start:end]))
            if _REPORTED.search(unquoted[max(start, position - REPORTED_CHARS) : position]):
                continue
            if match.group()[:2].lower() == "as" and not first_person:
                continue
            return True
    return False


OPENING_CHARS = 300  # what an answer opens with
_LEAD = (
    r"\W{0,9}(?:(?:well|hmm+|um+|uh|oh|ok|okay|so|hi|hello|hey|honestly|unfortunately|actually|yes|yeah|ah)\b"
    r"[\s,.!:…]{1,5}){0,4}"
)
_SORRY = (
    r"(?:(?:I['’]m|I am|we['’]re|we are)?\s*(?:so |very |really |truly |terribly )?(?:sorry|afraid)|"
    r"(?:my |please accept my )?(?:sincere )?apologies|I (?:do |must )?(?:sincerely )?apologi[sz]e|forgive me|"
    r"excuse me|pardon me|regrettably|unfortunately)"
)
_AS_AI = (
    r"as (?:an? |your )?(?:\w+ ){0,3}?(?:AI|A\.I\.|artificial intelligence|language model|LLM|chat ?bot|"
    r"digital assistant|virtual assistant|machine learning model|computer program|text-based model)\b[^.!?\n]{0,60}?,"
)
_HEDGES = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        _AS_AI,
        r"(?:I['’]m|I am) (?:just |only |merely |simply )(?:an? )(?:\w+ ){0,3}?(?:AI|language model|chat ?bot|"
        r"computer program|machine)\b",
        r"(?:I['’]m|I am) an? (?:\w+ ){0,3}?(?:AI|language model|chat ?bot)\b[^.!?\n]{0,50}?"
        r"\b(?:so|and|but|therefore)\b[^.!?\n]{0,20}\b(?:can(?:no|['’])t|don['’]t|do not|unable|no)\b",
        rf"{_SORRY}[\s,.:;—-]*(?:for|about|if|that)\b[^.!?\n]{{0,40}}\b(?:confus|misunder|mistake|error|unclear|"
        r"not (?:been )?(?:clear|clearer)|inconvenience|oversight|earlier|previous|delay|trouble)",
        r"(?:I['’]m|I am) (?:really |quite |still |honestly |actually |just )?"
        r"(?:not (?:really |quite |entirely |completely |totally |exactly |very |too |at all |100% |so |that )?"
        r"(?:sure|certain|familiar|clear|aware)|unsure|uncertain|a (?:bit|little) (?:confused|unsure)|confused)\b",
        rf"{_SORRY}[\s,.:;—-]*(?:but |so )?(?:I )?(?:I['’]m |am )?(?:(?:do not|don['’]t|did not|didn['’]t) "
        r"(?:quite |fully |really )?(?:understand|follow|get|know|have enough)|not "
        r"(?:really |quite |entirely )?(?:sure|certain|clear)|"
        r"(?:a (?:bit|little) )?confused|unsure)",
        r"I (?:do not|don['’]t|did not|didn['’]t) (?:quite |fully |really |entirely )?(?:understand|follow|get) "
        r"(?:what|your|the question|the request|that|you|which)",
        r"I (?:do not|don['’]t) (?:really |actually |honestly )?(?:know|have)(?: (?:much|a lot|enough|anything|any "
        r"(?:personal )?(?:opinion|feeling|preference|information|experience|belief)s?)\b| (?:for sure|exactly)\b|,? "
        r"but\b|, (?:sorry|maybe|perhaps|it)|\s+if (?:this|that|it|I))",
        r"I (?:think|guess|suppose|believe|would guess|would think)(?:,? (?:it|this|that|you|the answer|maybe|perhaps|"
        r"probably)?[^.!?\n]{0,30}\b(?:might|maybe|perhaps|probably|possibly|not sure|could be)\b)",
        r"(?:it['’]s|it is|that['’]s|this is|that is) (?:really |very |quite |a (?:bit|little) |rather |somewhat |"
        r"pretty |always )?(?:hard|difficult|tricky|impossible|tough) (?:for me )?to (?:say|tell|know|answer|give|"
        r"be sure|be certain|judge|determine|provide)",
        r"that['’]?s? (?:is )?(?:really )?(?:a |an )?(?:very |really |pretty )?(?:tough|hard|difficult|tricky) "
        r"(?:question|one)\b",
        r"(?:maybe|perhaps|possibly),? I(?:['’]m| am| do|['’]d)?\b",
        r"(?:could|can|would) you (?:please |kindly |perhaps )?(?:clarify|elaborate|be more specific|explain what|"
        r"rephrase|tell me (?:more|what you mean)|provide (?:more|some|additional|further)|"
        r"give me (?:more|a bit more|some))",
        r"(?:please|kindly) (?:clarify|provide (?:more|some|additional|further)|be more specific|give me more|rephrase|"
        r"note that (?:I am|I['’]m|as an AI))",
        r"what (?:exactly )?do you mean",
        r"(?:to be honest|I must admit|I have to admit|I must say|I should mention|I should note|first of all|keep in "
        r"mind|please note|note|disclaimer|just to be clear|before I answer)[\s,:]+(?:that )?(?:I['’]m|I am|as an AI|"
        r"I do not|I don['’]t|I can(?:no|['’])t|this is not)",
        r"(?:I['’]m|I am) (?:not an? |no )(?:\w+ )?(?:expert|doctor|lawyer|professional|physician|therapist|specialist|"
        r"financial|medical|attorney)",
        r"there(?:['’]s| is) no (?:easy|simple|single|one|definitive|clear|straightforward|right) (?:or \w+ )?answer",
        r"(?:it['’]s|it is) (?:important|worth|essential|crucial) to (?:note|remember|mention|understand|keep in mind)|"
        r"it['’]s worth (?:noting|mentioning)",
        r"I (?:would|['’]d) (?:need|have to know|like to know|need to know) (?:more|some more|a (?:bit|little) more)",
    )
)


def hedge_opening(text: str) -> bool:
    """Whether an answer opens with a disclaimer, doubt, apology or question back in place of the answer.

    A plain statement of what is not known ("I don't know anyone called X."),
    sympathy, and doubt within the answer do not count.
    """
    opening = _opening(text)
    return any(pattern.match(opening) for pattern in _HEDGES)


def _opening(text: str) -> str:
    return text.lstrip()[:OPENING_CHARS]


_CANNOT = (
    r"(?:can(?:not|['’]t| not)(?: and will not| and won['’]t)?|could(?: not|n['’]t)|"
    r"(?:am|['’]m) (?:not able|unable|not allowed|not permitted|not designed|not programmed|not in a position)|"
    r"(?:do not|don['’]t) have the (?:ability|capability|capacity)|(?:will not|won['’]t)|"
    r"(?:would|['’]d) (?:rather not|prefer not)|refuse|decline)"
)
_DO = (
    r"(?:to )?(?:\w+ly )?(?:help(?! but)|assist|provide|answer|respond|comply|fulfil|fulfill|give|offer|discuss|"
    r"do (?:that|this|so|it)|engage|support|generate|create|write|produce|share|complete|continue|participate|condone|"
    r"encourage|promote|recommend(?! \w+(?: \w+)? (?:highly )?enough)|suggest|tell|advise|talk|access|browse|process|"
    r"perform|open|view|see|play|make|carry|be (?:of|part)|search|look|predict|translate|summari[sz]e|express|diagnose|"
    r"comment|accommodate|proceed|send|execute|explain|describe|with|take part)\b"
)
_RULES = r"(?:rules|guidelines|policy|policies|principles|programming|terms|standards)"
_REFUSALS = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:{_SORRY}[\s,.:;—-]*(?:but |that |to say (?:that )?|however,? )?)?(?:{_AS_AI}\s*)?(?:but )?I\s?"
        rf"(?:simply |just |really |honestly |also |absolutely |definitely )?{_CANNOT}\s+(?:really )?"
        rf"(?:(?:with|in) (?:a )?good conscience,? )?{_DO}",
        r"I(?:['’]m| am)? (?:not comfortable|do not feel comfortable|don['’]t feel comfortable)\b",
        rf"{_SORRY}[\s,.:;—-]*(?:but |that )?(?:this(?: request)?|that|it|(?:your|the) request|such \w+)(?:['’]s| is|"
        r" would be| goes)? ?(?:not (?:something|appropriate|possible for me|allowed)|against|inappropriate|violates?|"
        r"outside (?:of )?my|beyond my|unethical)",
        r"(?:this|that|it|your request|the request|this request|such a request)(?: is|['’]s)? "
        rf"(?:not something I|against (?:my|our|the) {_RULES}|outside (?:of )?my|beyond my|violates (?:my|our|the) )",
        r"(?:it is|it['’]s|it would be) (?:not (?:appropriate|ethical|right|possible for me)|inappropriate|unethical|"
        r"wrong|illegal) (?:for me|to (?:help|assist|provide|joke|share|write|discuss|give|support))",
        r"no[,.!]? (?:I (?:will not|won['’]t|refuse|must (?:decline|refuse))|(?:I['’]m )?sorry[,.!;])",
        rf"{_SORRY}[,.;]? (?:but )?no[,.!]",
        rf"my (?:\w+ )?{_RULES} (?:do(?:es)? not|don['’]t|doesn['’]t|prohibits?|prevents?|forbids?|keeps? me)",
        r"I(?:['’]m| am)? ?(?:must|have to|need to|going to|going to have to|['’]ll have to|respectfully)? ?"
        r"(?:respectfully |politely |also )?(?:decline|refuse|have to decline|have to refuse)\b(?! the)",
        r"I (?:do not|don['’]t) (?:think (?:that )?(?:I can (?:help|do|assist|answer)|I should (?:help|do|answer)|"
        r"I['’]m able|it(?:['’]s| is| would be) (?:appropriate|right) (?:for me|to))|have (?:the (?:ability|capability|"
        r"capacity)|(?:direct |real-time )?access) to)",
        rf"(?:as|being) (?:an? |your )(?:\w+ ){{0,4}}?(?:AI|language model|assistant|chat ?bot)\b[^.!?\n]{{0,60}}?,? I "
        rf"(?:\w+ly )?(?:{_CANNOT}\s|(?:do not|don['’]t) have (?:the (?:ability|capability|capacity)|access))",
    )
)
_LIMIT_OF_KNOWLEDGE = re.compile(_LEAD + r"I (?:cannot|can['’]t) (?:know|be (?:sure|certain)|tell)\b", re.IGNORECASE)


def refusal_opening(text: str) -> bool:
    """Whether an answer opens by declining what was asked.

    An answer of "no" to a question of fact, and "I cannot know that", do not count.
    """
    opening = _opening(text)
    return not _LIMIT_OF_KNOWLEDGE.match(opening) and any(pattern.match(opening) for pattern in _REFUSALS)


_TERMINAL = ".!?…。！？"
_CLOSERS = "\"'”’»)]}*_~`>|」』）"
_FUNCTION_WORDS = frozenset(
    "a an the and or but nor so of to in on at by for from with without into onto over under between among through "
    "during about as than that which who whom whose because although though while when where if unless until since is "
    "are was were be been being am has have had do does did will would can could should may might must shall my your "
    "his her its our their this these those some any every each such very more most also not only both either neither "
    "per via like including i we he she they it's it's i'm don't there upon within against toward towards always "
    "others often never just where whether next same other".split()
)
_LIST_ITEM = re.compile(r"^\s*(?:[-*+•–]|\(?\d{1,3}[.):]|\(?[a-zA-Z][.)])(?:\s+|$)")
_BARE_ITEM = re.compile(r"^\s*(?:[-*+•–]|\d{1,3}[.)]|\*\*\d{1,3}[.)]?\*\*)\s*$")
_CODE_LINE = re.compile(
    r"^\s{2,}\S|^\t|[;{}]\s*$|^\s*(?:return|import|from|raise|assert|yield|del|print|pass|break|continue|def|class|for|"
    r"while|if|else|elif|try|except|with|let|const|var|SELECT|INSERT|UPDATE|>>>|\$|#include|@)\b.*[\w)\]}\"'=:]\s*$|"
    r"^\s*[\w.\[\]\"']+\s*[-+*/%|&]?=\s*\S|^\s*[\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\)\s*$|^\s*(?:>>>|\$|</?\w)"
)
_OPEN_ENDS = re.compile(r"(?:[,:;(\[{\\+*/=<&|-]|\b(?:and|or|not|in|is|lambda|return a|import))\s*$")
_ADDRESS = re.compile(r"[(<]?(?:https?://|www\.|[\w.+-]+@\w|[\w~.]*/[\w.-]+/|[\w-]+(?:\.[\w-]+)*\.\w{2,4}$)")
SHORT_WORDS = 8  # an answer without a full stop may be a name, a title or a phrase up to this length


def truncated(text: str) -> bool:
    """Whether an answer was cut off before its end.

    Whole are: terminal punctuation, a closed fence, a number, a table row, a
    list item, code, verse, an address, a signature, and a short answer that
    does not end in a word that must go on ("of", "the", "is").
    """
    body = text.rstrip()
    if not body.strip():
        return False
    # A fence that is opened and closed on one line is neither.
    fences = [line for line in body.split("\n") if line.lstrip().startswith("```") and line.count("```") % 2]
    if len(fences) % 2:
        return True
    if fences and body.split("\n")[-1].lstrip().startswith("```"):
        return False
    lines = [line for line in body.split("\n") if line.strip()]
    last = lines[-1].rstrip()
    if _BARE_ITEM.match(last):
        return len(lines) > 1
    if _is_code(lines):
        return _cut_code(lines)
    core = last.rstrip(_CLOSERS + " ")
    if not core:
        return False
    if core[-1] in _TERMINAL:
        return last.count("(") > last.count(")") and not last.rstrip().endswith(tuple(_TERMINAL))
    if last.rstrip("*_ ")[-1:] in ",:;(-—–[{&+=/":
        return True
    if last[-1] in "\"'`”’»)]}" or core[-1] > "\u024f":  # other scripts set words apart and end sentences otherwise
        return False
    words = re.findall(r"[\w'’]+", core)
    if words and words[-1].replace("’", "'") in _FUNCTION_WORDS:
        return len(words) > 1
    if core[-1].isdigit() or not core[-1].isalnum():
        return False
    if last[-1] == "|" or _ADDRESS.match(last.split()[-1][:300]):
        return False
    before = lines[:-1]
    if _LIST_ITEM.match(last) or last.lstrip().startswith(("#", "|", ">")):
        peers = [line.rstrip().rstrip(_CLOSERS) for line in before if _LIST_ITEM.match(line)]
        ended_count = sum(peer.endswith(tuple(_TERMINAL)) for peer in peers)
        return len(peers) > 1 and ended_count == len(peers)
    if before:
        # Verse, a listing, a signature under its closing line: the line before ends in no full stop either.
        end = before[-1].rstrip().rstrip(_CLOSERS + " ")[-1:]
        if end and end not in _TERMINAL and end != ":":
            return False
        return len(words) > 3
    sentences = re.split(r"(?<=[.!?])\s+", core)
    return len(sentences) > 1 or len(words) > SHORT_WORDS


def _is_code(lines: list[str]) -> bool:
    if re.match(r"\s*(?:\{\s*[\"'\]}]|\[\s*[\"'{\[\d])", lines[0]):
        return True  # JSON
    if re.match(r"(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE)\b", lines[0]):
        return True
    if len(lines[-1]) > 1000 or not _CODE_LINE.search(lines[-1]) or _LIST_ITEM.match(lines[-1]):
        return False
    return len(lines) == 1 or sum(bool(_CODE_LINE.search(line[:1000])) for line in lines[-3:]) >= min(2, len(lines))


def _cut_code(lines: list[str]) -> bool:
    text = "\n".join(lines)
    if re.search(r"\b(?:WHERE|FROM|SELECT|AND|OR|BY|SET|ON|VALUES|INTO|JOIN)$", text):
        return True
    open_brackets = any(text.count(a) > text.count(b) for a, b in ("()", "[]", "{}"))
    return open_brackets or bool(_OPEN_ENDS.search(lines[-1]))
