"""Encodings are found for text of many languages, and text that was decoded in a wrong one is told from text that is right."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pytest

from athanor.base.errors import ParamsError
from athanor.text import encodings
from athanor.text.checks import MalformedRow, check_mojibake
from tests.sources.world import read, source

TEXTS = {
    "Russian": "Старый город у моря просыпается медленно, когда серый свет идёт над водой. Вы были вчера? - спросил он.",
    "Ukrainian": "Старе місто біля моря прокидається повільно. Він її не любить, але їй це й не потрібно, бо життя триває.",
    "Chinese": "老城在海边慢慢醒来。灰色的光照在水面上，小船碰着码头。面包师打开他的门，一个女人把鱼数进篮子里。",
    "Taiwanese": "老城在海邊慢慢醒來。灰色的光照在水面上，小船碰著碼頭。麵包師打開他的門，一個女人把魚數進籃子裡。",
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗い所で泣いていた。",
    "Korean": "바다 옆의 오래된 도시는 회색빛이 물 위로 올 때 천천히 깨어난다. 빵집 주인은 문을 열고 물고기를 센다.",
    "German": "Die alte Stadt erwacht, wenn graues Licht über das Wasser kommt. Der Bäcker öffnet seine Tür, und Größe zählt.",
    "French": "La ville s’éveille quand la lumière arrive à côté de la forêt, où l’été déjà s’achève. « Ça va ? » très étonnée.",
    "Norwegian": "Den gamle byen ved havet våkner når grått lys kommer og båtene slår mot bryggen. Bakeren åpner døren for været.",
    "Portuguese": "A mulher não sabe quantos peixes há, porém conta-os até que haja ações. Coração, irmã, amanhã, você também.",
    "Polish": "Stare miasto nad morzem budzi się powoli, gdy szare światło przychodzi nad wodę, a łodzie biją o brzeg. Że też źle!",
    "Czech": "Staré město u moře se probouzí pomalu, když šedé světlo přichází nad vodu. Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Hungarian": "A tengerparti öreg város lassan ébred, amikor szürke fény jön a víz fölött, és esőre várunk. Győr, fűtő, űr, bőrönd.",
    "Turkish": "Deniz kıyısındaki eski şehir yavaşça uyanır. Fırıncı kapısını açar, kadın balıkları sayar. Dün vapur gelmedi, değil mi?",
    "Greek": "Η παλιά πόλη δίπλα στη θάλασσα ξυπνά αργά όταν το γκρίζο φως έρχεται πάνω από το νερό.",
    "Arabic": "تستيقظ المدينة القديمة على البحر ببطء عندما يأتي الضوء الرمادي فوق الماء.",
    "Hebrew": "העיר העתיקה ליד הים מתעוררת לאט כאשר אור אפור בא מעל המים והסירות מכות ברציף.",
    "Thai": "เมืองเก่าริมทะเลตื่นขึ้นช้าๆ เมื่อแสงสีเทาส่องเหนือผืนน้ำและเรือกระทบท่า",
    "Lithuanian": "Senasis miestas prie jūros bunda lėtai, kai šviesa ateina virš vandens. Kepėjas atidaro duris, žuvys, kurią mačiau.",
    "Icelandic": "Gamli bærinn við sjóinn vaknar hægt þegar grátt ljós kemur yfir vatnið. Það er þögn í húsinu, sagði Þórður.",
    "quoted English": "It was the baker’s day, and she didn’t mind. “Yes,” he said — and that was all… “No,” she said. It’s late.",
}  # fmt: skip
ENCODINGS = {
    "Russian": "cp1251 koi8_r cp866 iso8859_5",
    "Ukrainian": "cp1251 koi8_u",
    "Chinese": "gb18030",
    "Taiwanese": "big5 gb18030",
    "Japanese": "cp932 euc_jp iso2022_jp",
    "Korean": "euc_kr",
    "German": "cp1252 cp850 mac_roman",
    "French": "cp1252 mac_roman",
    "Norwegian": "cp1252",
    "Portuguese": "cp1252",
    "Polish": "cp1250 iso8859_2",
    "Czech": "cp1250 iso8859_2",
    "Hungarian": "cp1250",
    "Turkish": "cp1254",
    "Greek": "cp1253 iso8859_7",
    "Arabic": "cp1256",
    "Hebrew": "cp1255",
    "Thai": "cp874",
    "Lithuanian": "cp1257",
    "Icelandic": "cp1252",
    "quoted English": "cp1252 mac_roman",
}
CASES = [(language, encoding) for language, names in ENCODINGS.items() for encoding in names.split()]


@pytest.mark.parametrize(("language", "encoding"), CASES)
def test_a_file_is_read_as_it_was_written_and_never_as_something_else(tmp_path, language, encoding):
    text = TEXTS[language]
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "utf8.txt").write_text(text, encoding="utf-8")
    assert [document.text for document in read(tmp_path / "*", encoding="detect")] == [text, text]
    assert [document.text for document in read(tmp_path / "*", encoding=encoding)] == [text, text]
    # What is typed for the advice reads the file.
    (document,) = read(tmp_path / "a.txt", encoding=encodings.detect(text.encode(encoding)).encoding)
    assert document.text == text


WRONG = [(*case, read_as) for case in CASES for read_as in ("latin_1", "cp1252") if case[1] != read_as]


@pytest.mark.parametrize(("language", "encoding", "read_as"), WRONG)
def test_text_that_was_read_in_a_wrong_encoding_is_refused_with_the_right_one(language, encoding, read_as):
    """The advice for a Russian file (`iconv -f WINDOWS-1252`) made it mojibake, which was trained on."""
    text = "\n".join(2 * [TEXTS[language]])
    try:
        wrong = text.encode(encoding).decode(read_as)
    except UnicodeDecodeError:
        return  # it cannot be read so
    if wrong == text:
        return
    found = encodings.mojibake(wrong)
    assert wrong.encode(found.other).decode(found.encoding) == text


@pytest.mark.parametrize("language", TEXTS)
def test_utf8_that_was_read_twice_is_refused(language):
    text = "\n".join(2 * [TEXTS[language]])
    for read_as in ("latin_1", "cp1252", "cp1251", "mac_roman", "cp437", "koi8_r", "gb18030"):
        try:
            wrong = text.encode().decode(read_as)
        except UnicodeDecodeError:
            continue
        assert encodings.mojibake(wrong).encoding == "utf-8"


RIGHT = {
    "accents": "naïve café Zürich Ångström São Paulo Malmö Þór Cañón Søren Éric Ça Brontë Noël Motörhead Håkon Łódź İzmir",
    "mixed": "Die Größe der Straße. L’été à côté de la forêt. ¿Qué pasó, señor? Não, obrigação. Å være på øya.",
    "French marks": "« Été » ; « où ça ? » « déjà\u00a0» « allé\u00a0» « parlé\u00a0» « fini\u00a0» « né\u00a0»",
    "capitals": "L’ÉTÉ À L’ÎLE D’OLÉRON. EL NIÑO ESPAÑOL: ¿QUÉ? SÃO, NÃO, AÇÃO, IRMÃ» DIE GRÖSSTE ÜBERRASCHUNG ÄNDERT ÖL",
    "camel": "getÉlan setÜber maxÖl McÉwan dÉric lÎle",
    "phonetic": "ˈfəʊnətɪks ðə ɪntəˈnæʃənəl θɪŋ /ð æ ø ç/ ðæt [bæð] [ðæn] ø: /fæð/",
    "mathematics": "∀x∈ℝ: x² ≥ 0, aᵢ² × 3 ± √2 ≠ ½ ÷ 3 µm² 10³ m³/s 90° x³y² ¬p α + β → 0",
    "Latin-1 mathematics": "x² + y² = z², 3 × 4 ± 5 ÷ 2, 10µm, 5 m³, a²b³c¹, 90°, ½x, ¬p, § 4 ¶ 5 © 1º 2ª word¹ £5 ¥7",
    "Vietnamese": "Thành phố cổ bên bờ biển thức dậy chậm rãi khi ánh sáng xám tràn qua mặt nước",
    "Pinyin": "Nǐ hǎo, wǒ jiào Lǐ Míng, wǒ shì Běijīng rén", "Yoruba": "Ọjọ́ mẹ́ta ni mo ti wà níbí, ẹ káàárọ̀",
    "Old English": "Hwæt! We Gardena in geardagum þeodcyninga þrym gefrunon hu ða æþelingas ellen fremedon",
    "Guarani": "Mba’éichapa, che ha’e Ñande ypy, yvyra ha ka’aguy, ẽ ĩ õ ũ ỹ g̃", "Hindi": "पुराना शहर समुद्र के पास धीरे-धीरे",
    "Esperanto": "Ĉiuj homoj estas denaske liberaj kaj egalaj laŭ digno kaj rajtoj ŝi ĝi ĵus ĥoro",
    "art": "————————\n•••••••• item\n°°°° §§§ ¶¶¶ «««»»» ¯\\_(ツ)_/¯ ████ ░▒▓ ┌──┐ │ └──┘ ¯¯¯¯ ·.¸¸.·´¯`·.¸¸ °º¤ø,¸¸,ø¤º°",
    "emoji": "Hi 😀 there 🎉 ok 👍 done ✅ and ❤️", "code": "x = 'é' # naïve\ns = u'ü' + 'ß' + '\u00a0'\nprint('→ ✓ …')",
    "table": "".join(map(chr, range(0xC0, 0x100))), "letters": "\n".join(f"{n:02X} {chr(n)}" for n in range(0xA0, 0x100)),
    "pattern": "[A-Za-zÀ-ÖØ-öø-ÿ]+ and ÀÁÂÃÄÅ ÈÉÊË ÌÍÎÏ ÒÓÔÕÖ ÙÚÛÜ Ý àáâãäå èéêë ìíîï òóôõö ùúûü ýÿ", "one letter": "é" * 30,
    "single letters": "é, è, ê, ë: à, â; ù, û - ç ! ô ï î",
    "short Russian": "домашнее задание.", "Russian places": "находится ближайшая аптека.", "Russian words": "сон, рок, чай, шаг",
    "short Greek": "η πρωτεύουσα της",
    "half-width": "ｱｲｳｴｵ カタカナ ひらがな 漢字", "ASCII": "plain", "colours": "\x1b[31mred\x1b[0m",
}  # fmt: skip


@pytest.mark.parametrize("name", [*RIGHT, *TEXTS])
@pytest.mark.parametrize("times", [1, 9])
def test_text_that_is_right_is_let_through(name, times):
    text = RIGHT[name] if name in RIGHT else TEXTS[name]
    assert encodings.mojibake("\n".join([text] * times)) is None


@pytest.mark.parametrize(
    ("language", "encoding"), [("Russian", "cp1251"), ("Chinese", "gb18030"), ("Polish", "cp1250")]
)
@pytest.mark.parametrize("old", [1, 9])
def test_a_file_that_was_put_together_from_two_is_read_line_by_line(tmp_path, language, encoding, old):
    text = TEXTS[language]
    (tmp_path / "a.txt").write_bytes(b"\n".join([text.encode(encoding)] * old + [text.encode()] * 5))
    (document,) = read(tmp_path / "a.txt", encoding="detect")
    assert document.text == "\n".join([text] * (old + 5))


@pytest.mark.skipif(shutil.which("iconv") is None, reason="no iconv")
@pytest.mark.parametrize(
    ("language", "encoding"), [("Russian", "koi8_r"), ("French", "mac_roman"), ("Japanese", "utf-8")]
)
def test_the_command_that_is_advised_repairs_the_file(tmp_path, language, encoding):
    text = TEXTS[language]
    (tmp_path / "OLD").write_text(text.encode(encoding).decode("latin-1"), encoding="utf-8")
    with pytest.raises(MalformedRow) as caught:
        check_mojibake((tmp_path / "OLD").read_text(encoding="utf-8"), "OLD")
    subprocess.run(caught.value.fix.partition("repair it: ")[2], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "NEW").read_text(encoding="utf-8") == text


def test_what_is_lost_is_told():
    assert encodings.mojibake("Das Br�tchen f�r den B�cker �ffnet sp�t, fr�h und gr�n �ber M�nchen.").encoding == ""


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_marks_and_utf16(tmp_path, encoding):
    """Files of Windows' editors, of text and of rows."""
    text = "A line of English, and Käse.\r\n" * 3
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.jsonl").write_bytes('{"text": "Käse"}\r\n\r\n{"text": "Öl"}\r\n'.encode(encoding))
    (tmp_path / "c.csv").write_bytes('text;n\r\n"Käse\r\nund Öl";1\r\n'.encode(encoding))
    setting = {} if encoding in ("utf-16", "utf-32", "utf-8-sig") else {"encoding": "detect"}
    assert [document.text for document in read(tmp_path / "*", **setting)] == [text, "Käse", "Öl", "Käse\r\nund Öl"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [("שלום לכולם", "cp1255"), ("猫が好きです", "euc_jp"), ("Река медленно", "cp1251"), ("العربية", "iso8859_6")],
)
def test_of_little_text_no_encoding_is_sure(text, encoding):
    found = encodings.choose(text.encode(encoding), "detect")
    assert found is None or str(getattr(found, "text", "")) == text or not found.sure


def test_short_rows_of_a_named_encoding_are_read_in_it(tmp_path):
    words = "一 猫 水 山 石 目 木 牛 学校 谢谢 老城在海边慢慢醒来".split()
    for encoding in ("gb18030", "utf-8"):
        (tmp_path / "a.csv").write_bytes("\n".join(["text,n", *(f"{word},1" for word in words)]).encode(encoding))
        assert [document.text for document in read(tmp_path / "a.csv", encoding="gb18030")] == words


def test_a_page_that_declares_its_encoding_is_read_in_that(tmp_path):
    page = '<html><head><meta charset="koi8-r"></head><body>Привет, это страница</body></html>'
    (tmp_path / "a.html").write_bytes(page.encode("koi8_r"))
    assert [document.text for document in read(tmp_path / "a.html", encoding="cp1251")] == ["Привет, это страница"]


def test_an_accent_as_the_last_byte_is_read_in_the_named_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line one\nun petit caf\xe9")
    assert [document.text for document in read(tmp_path / "a.txt", encoding="cp1252")] == ["line one\nun petit café"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.html", "a.md.gz"])
def test_rows_and_pages_in_an_old_encoding(tmp_path, name):
    text = TEXTS["Russian"]
    written = {
        "a.jsonl": f'{{"text": "first"}}\n{{"text": "{text}"}}\n', "a.json": f'[{{"text": "first"}},\n{{"text": "{text}"}}]',
        "a.csv": f"text,n\nfirst,1\n\"{text}\",2\n", "a.tsv": f"n\ttext\n1\tfirst\n2\t{text}\n",
        "a.html": f"<meta charset='windows-1251'><p>first</p><p>{text}</p>", "a.md.gz": f"first\n\n{text}",
    }[name].encode("cp1251")  # fmt: skip
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith(".gz") else written)
    found = "\n\n".join(document.text for document in read(tmp_path / name, encoding="detect"))
    assert found == f"first\n\n{text}"
    if name == "a.html":  # says itself what it is in
        assert read(tmp_path / name)


def test_one_letter_is_asked_about_and_an_encoding_has_to_exist(tmp_path):
    guess = encodings.detect("Käse".encode("latin-1"))
    assert (guess.encoding, guess.sure, guess.line, guess.other) == ("cp1252", False, "Käse", "cp850")
    for encoding in ("klingon", "base64"):
        with pytest.raises(ParamsError, match="encoding: unknown encoding .*for example cp1251, gb18030 or detect"):
            source("a.txt", encoding=encoding)
