"""Small corpora in many languages and in none, by seeded rules: name -> (text, the kind that `athanor new` proposes)."""

from __future__ import annotations

import random

_rng = random.Random(7)


def _words(words: str, glue: str = " ", end: str = ". ", gap: str = "\n\n", size: int = 100_000) -> str:
    """Sentences of random words, in paragraphs."""
    atoms, parts = words.split(), [""]
    while sum(map(len, parts)) < size:
        sentences = (glue.join(_rng.choices(atoms, k=_rng.randint(8, 18))) for _ in range(_rng.randint(3, 7)))
        parts.append("".join(sentence.capitalize() + end for sentence in sentences))
    return gap.join(parts[1:]) + "\n"


def _lines(make, count: int) -> str:
    return "".join(f"{make()}\n" for _ in range(count))


_ZH = " ".join(
    "老城在海边慢慢醒来灰色的光照在水面上小船碰着码头面包师打开他的门一个女人把鱼数进篮子里市场很快就会满是谈论风和价钱的人昨天渡船没有来我们都在等着春天"
)
_JA = "古い 港町 は 朝 に ゆっくり 目を 覚ます パン屋 が 戸 を 開け 女 の 人 が 魚 を 数える 市場 で 風 と 値段 の 話 を する"
_TH = "เมืองเก่า ริม ทะเล ตื่น ช้า ๆ แสง สีเทา เหนือ น้ำ เรือ กระทบ ท่า คนทำขนมปัง เปิด ประตู ผู้หญิง นับ ปลา ใส่ ตะกร้า"
_AR = "المدينة القديمة على البحر تستيقظ ببطء والضوء الرمادي فوق الماء والقوارب تضرب الرصيف بينما يفتح الخباز بابه"
_HI = "पुराना शहर समुद्र के किनारे धीरे से जागता है जब धूसर रोशनी पानी पर आती है और नावें घाट से टकराती हैं"
_RU = "старый город у моря просыпается медленно когда серый свет идёт над водой и лодки стучат о причал пока пекарь открывает"
_TR = "eski liman kasabası yavaş uyanır gri ışık suyun üzerine gelince tekneler iskeleye vurur fırıncı kapısını açar kadın"
_VI = "thị trấn cảng cũ thức dậy chậm khi ánh sáng xám đến trên mặt nước và thuyền va vào bến người thợ bánh mở cửa"
_EN = "the old harbour town wakes slowly when grey light comes over the water and boats knock against the quay while a baker"
_BITS = "if(a){return b.c(d)}else{for(var e=0;e<f.g;e++){h[i]=j}} function(k,l) const m=n=>o?p:q; this.r.s=new".split()


def _move() -> str:
    return _rng.choice("KQRBN" + " " * 5).strip() + _rng.choice("abcdefgh") + _rng.choice("12345678")


def _game() -> str:
    moves = " ".join(f"{n}. {_move()} {_move()}" for n in range(1, _rng.randint(20, 50)))
    return f"{moves} {_rng.choice(('1-0', '0-1', '1/2-1/2'))}\n"


def _log() -> str:
    return (
        f"2026-03-{_rng.randint(1, 28):02}T04:{_rng.randint(10, 59)}:{_rng.randint(10, 59)}Z {_rng.choice(('INFO', 'WARN'))}"
        f" worker[{_rng.randint(1, 99)}] job={_rng.getrandbits(40):010x} took={_rng.randint(1, 900)}ms"
    )


def _drawn(atoms, glue: str, size: int):
    return lambda: glue.join(_rng.choices(atoms, k=size))


CORPORA = {
    "chinese": (_words(_ZH, "", "。", size=60_000), "prose"),
    "chinese-one-line": (_words(_ZH, "", "", "", size=60_000).strip(), "prose"),
    "japanese": (_words(_JA, "", "。", size=60_000), "prose"),
    "thai": (_words(_TH, "", " ", size=60_000), "prose"),
    "arabic": (_words(_AR), "prose"),
    "hindi": (_words(_HI, end="। "), "prose"),
    "russian": (_words(_RU), "prose"),
    "turkish": (_words(_TR), "prose"),
    "vietnamese": (_words(_VI), "prose"),
    "poetry": (_lines(lambda: " ".join(_rng.choices(_EN.split(), k=6)), 3000), "prose"),
    "one-line": (_words(_EN, gap=" ", size=300_000).replace("\n", ""), "prose"),
    "dna": (_lines(_drawn("ACGT", "", 70), 3000), "tokens"),
    "fasta": (
        _lines(
            lambda: (
                f">sp|P{_rng.randint(0, 9999)}|{_rng.choice(_EN.split())}\n{_drawn('ACDEFGHIKLMNPQRSTVWY', '', 80)()}"
            ),
            2500,
        ),
        "tokens",
    ),
    "dna-one-line": (_drawn("acgt", "", 200_000)(), "tokens"),
    "protein": (_lines(_drawn("ACDEFGHIKLMNPQRSTVWY", "", 60), 3000), "tokens"),
    "midi": (_lines(_drawn([f"{a}{n}" for a in "nvd" for n in range(128)], " ", 90), 600), "tokens"),
    "smiles": (_lines(_drawn("CCCCNOcc1()=[]+-S@", "", 40), 5000), "tokens"),
    "chess": (_lines(_game, 400), "tokens"),
    "logs": (_lines(_log, 2500), "tokens"),
    "minified": (_drawn(_BITS, ";", 20_000)(), "tokens"),
}
