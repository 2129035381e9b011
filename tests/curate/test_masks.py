# covers: lib/curate/masks/masker.py, lib/curate/masks/finders.py, lib/curate/masks/emails.py
# covers: lib/curate/masks/addresses.py, lib/curate/masks/phones.py, lib/curate/masks/accounts.py
# covers: lib/curate/masks/matches.py
"""Masks replace e-mail addresses, IP addresses and numbers, and nothing that only looks like one.

In each table, a text after the arrow is expected; a line without an arrow stays unchanged.
"""

from __future__ import annotations

import ipaddress
import random
import re

import pytest

from lib.curate.masks import accounts, addresses, masker
from lib.curate.masks.choices import KINDS
from lib.curate.masks.masker import Masker, normalize_match
from lib.curate.masks.matches import (
    MaskedMatches,
    add_counts,
    count_matches,
    describe_shape,
    rank_sources,
    sum_kinds,
)

EMAILS = """
joe@example.com → <email>
Mail joe.smith+x@sub.example.co.uk. → Mail <email>.
Müller@example.de, info@müller.de → <email>, <email>
info@mu\u0308ller.de → <email>
请联系foo@bar.com谢谢 → 请联系<email>谢谢
“joe@x.com”, «joe@x.com» → “<email>”, «<email>»
joe [at] x.com, joe(at)x.com → <email>, <email>
joe [at] x [dot] com, ok → <email>, ok
joe ( AT ) x.com → <email>
<joe@x.com> mailto:joe@x.com → <<email>> mailto:<email>
from joe@x.com: hi → from <email>: hi
O'Brien@x.com and 'joe@x.com' → <email> and '<email>'
https://x.com/?u=joe@x.com → https://x.com/?u=<email>
...joe@x.com... → ...<email>...
joe@x.photography, joe@xn--mller-kva.de → <email>, <email>
name.surname@hacienda.gov.py, name@empresa.com.py. → <email>, <email>.
a@x.edu.py b@x.org.py c@x.net.py d@x.COM.PY e@x.y.coop.py → <email> <email> <email> <email> <email>
joe@firma.pl joe@x.com.pl ana@x.rs → <email> <email> <email>
ion@x.gov.md x@x.so x@x.sh → <email> <email> <email>
git@github.com:org/repo.git
npm install lodash@4.17.21 @types/node@18.0.0 pkg@1.0.0-alpha.beta
icon@2x.png vue@next/dist.min.js wheel@pip.whl
run@setup.py decorator@com.py test@tests.unit.py
https://user:p@db.example.com/x postgres://joe@db.example.com
joe@example.com:22 joe@example.com:path/repo
@decorator.foo
attention = q@k.transpose(1) + w@self.inputs
a@b@c.com joe@localhost joe.@x.com joe@-x.com joe@x_.c0m
meet [at] noon (at) 5
"""
ADDRESSES = """
server 83.149.9.216 - - → server <ip> - -
http://8.8.4.4:80/ ping 8.8.8.8. → http://<ip>:80/ ping <ip>.
<td>8.8.8.8</td> ip=9.9.9.10 → <td><ip></td> ip=<ip>
8.8.8.1-8.8.8.9, 8.8.8.128/25 → <ip>-<ip>, <ip>/25
conversion 8.8.8.8 → conversion <ip>
2001:4860:4860::8888 and [2606:4700::1111]:443 → <ip> and [<ip>]:443
2a00:1450:4001:082b:0000:0000:0000:200e: down → <ip>: down
::ffff:8.8.8.8 → ::ffff:<ip>
10.0.0.1 192.168.1.1 127.0.0.1 172.16.5.4 169.254.1.1 100.64.3.2 192.0.2.1 224.0.0.251
section 4.3.2.1 Section 4.3.2.1 chapter 1.2.3.4 (§ 3.1.2.2)
version 1.2.3.4 v1.2.3.4 v. 1.2.3.4 AssemblyVersion("1.2.3.4") __version__ = "3.5.0.1"
OID 1.3.6.1 1.3.6.1.4.1 2.5.29.15 ObjectIdentifier("1.2.250.1")
1234.5.6.78 1.2.3.4567 1.2.3.4.5 x8.8.8.8 8.8.8.8x
4.3.2.1 Scope
300.1.1.1 08.8.8.8 1.4.0.0
pkg==1.2.3.4 foo-1.2.3.4.tar.gz Opera/9.8.7.6 1.2.3.4-beta ~=1.4.5.2
2001:db8::1 fe80::1 ::1 fd00::1 x[2001::2] std::vector 12:30:45 2001:11:12 2024:10:11
"""
PHONES = """
+49 30 1234567 and +49 (0)30 123456-78, ok → <phone> and <phone>, ok
+1 212-555-1234, +12125551234, +1 (212) 555-1234 → <phone>, <phone>, <phone>
tel:+442079460961 or +44 20 7946 0961. → tel:<phone> or <phone>.
(+33) 1 23 45 67 89, (+49)30 1234567 f(+33) 12 → <phone>, <phone> f(+33) 12
+33\u00a01\u00a023\u00a045\u00a067\u00a089 → <phone>
+49 151 12345678 2023 was → <phone> 2023 was
+49 30 1234567 (212) 555-1234 and +33 1 23 45 67 89 4111 → <phone> (212) 555-1234 and <phone> 4111
x +1234567890 i+1000000000 +35236450.6 1.5e+12345678 (a)+4915112345678
+1 555 123 4567 +44 1632 960961 +49 15 +7 123 456
@@ -1,2 +1234,5 @@ C++ 11 +0200 +1 +12 345 +99 123 456 789
(212) 555-1234 030 1234567 0171/1234567
"""
NATIONAL = """
(212) 555-1234, 212.555.1234, 1-212-555-1234 x → <phone>, <phone>, <phone> x
030 1234567, 0171/1234567, (030) 1234567 → <phone>, <phone>, <phone>
+1 555-123-4567 (555) 123-4567 0123 4567 8901 2345
Tel:030 1234567, Tel.:(030)1234567, Tel.030/1234567 → Tel:<phone>, Tel.:<phone>, Tel.<phone>
x,212-555-1234 fax/212-555-1234 tel-212-555-1234 → x,<phone> fax/<phone> tel-<phone>
"phone": "2125551234", phone_number=0301234567 → "phone": "<phone>", phone_number=<phone>
Call (212) 555-1234 10001 → Call <phone> 10001
<phone>,030 1234567;<phone>030 1234567 → <phone>,<phone>;<phone><phone>
1,212-555-1234 12:030 1234567 5/030 1234567 0.030 1234567 x-030-1234567 foo.030 1234567
01/02/2023 01 02 2023 02110-1301 2012-555-1234 112-555-1234 212-155-1234
01.02.2023, 01 - 02 - 2023 05-06-2024 12:30 02-03-04 05:06 2023-01-05 10:00:00 01.02.2024 02.03.2024
01.02.03.04 010.001.002.003 08.8.8.8 v01.02.03 012.345.678 0.05 01.234,56 2125551234 0301234567
ISBN 0306406152 ISBN 0-19-853453-1 550e8400-0301-4567-a716-446655440000 0123-4567-89ab
01 02 03 04 05 06 07 08 09 10 and 00 01 02 03 04 05 06 07 08
"""
# Invented numbers in the formats of ten countries.
FORMATS = {
    "US": "(212) 555-1234|212-555-1234|212.555.1234|212 555 1234|1-212-555-1234|(212)555-1234"
    "|212/555-1234|212\u2011555\u20111234|Phone: 2125551234|Tel:1 (212) 555-1234",
    "GB": "020 7946 0018|(020) 7946 0018|0161 496 0123|(0161) 4960123|07400 123456|Mob:07400123456",
    "FR": "01 23 45 67 89|06.12.34.56.78|06-12-34-56-78|06/12/34/56/78|Tél.:0612345678"
    "|06\u00a012\u00a034\u00a056\u00a078|Tél. 04 91 99 99 99|0033 6 12 34 56 78",
    "DE": "030 1234567|030/1234567|(030) 123 45 67|0171 / 1234567|(0 30) 12 34 56|030 123456-78"
    "|Telefon:0301234567|030 – 1234567",
    "NL": "020-1234567|06-12345678|06 12 34 56 78|(020) 123 45 67",
    "BE": "02 212 34 56|02/212.34.56|0470/12.34.56|0470 12 34 56|Gsm: 0470123456",
    "CH": "044 668 18 00|044.668.18.00|044/668 18 00|079 123 45 67",
    "JP": "03-1234-5678|(03)1234-5678|03(1234)5678|090-1234-5678|電話：03-1234-5678",
    "AU": "(02) 9876 5432|02 9876 5432|0412 345 678|0412-345-678",
    "TR": "0212 345 67 89|0 (212) 345 67 89|0(532) 123 45 67|0532 123 45 67",
}
ACCOUNTS = """
DE89 3704 0044 0532 0130 00 → <iban>
IBAN: DE89370400440532013000. → IBAN: <iban>.
GB82WEST12345698765432 NO9386011117947 → <iban> <iban>
MT84 MALT 0110 0001 2345 MTLC AST0 01S and so on → <iban> and so on
4111 1111 1111 1111 or 4111-1111-1111-1111 → <card> or <card>
no. 12 4111 1111 1111 1111 w9 4111 1111 1111 1111 27 → no. 12 <card> w9 <card> 27
4111111111111111, 378282246310005, 3782 822463 10005 → <card>, <card>, <card>
5555555555554444 2223003122003222 6011111111111117 3530111333300000 → <card> <card> <card> <card>
DE88370400440532013000 xDE89370400440532013000 DE89370400440532013000X ZZ89370400440532013000
4111111111111112 0.4111111111111111 4111111111111111.5 94111111111111111
1234 4111 1111 1111 1111 and 4111 1111 1111 1111 2222
4111-1111-1111-1111-1111 0000000000000000 1111111111111111 8111111111111119
"""


def list_cases(table: str) -> list[tuple[str, str]]:
    lines = [line.partition(" → ") for line in table.strip().splitlines()]
    return [(text, masked if arrow else text) for text, arrow, masked in lines]


@pytest.mark.parametrize(
    ("kinds", "countries", "table"),
    [
        (["email"], [], EMAILS),
        (["ip"], [], ADDRESSES),
        (["phone"], [], PHONES),
        (["phone"], ["US", "DE"], NATIONAL),
        (
            ["phone"],
            ["FR", "AT"],
            "01 23 45 67 89, 06/12/34/56/78, 01 234567890 → <phone>, <phone>, <phone>\n"
            "Tél.06 12 34 56 78 75001 Paris → Tél.<phone> 75001 Paris\n"
            "TÉL: 0123456789 24h/24, Tél. 01 23 45 67 89 24h/24 → "
            "TÉL: <phone> 24h/24, Tél. <phone> 24h/24\n"
            "01 02 03 04 05 06 07 08 09 10, 06.12.34.56, 06.12.2034",
        ),
        (["iban", "card"], [], ACCOUNTS),
    ],
    ids=["email", "ip", "phone", "national", "pairs", "account"],
)
def test_matches_are_replaced_and_other_text_stays(kinds, countries, table):
    masker = Masker(kinds, countries)
    for text, masked in list_cases(table):
        assert masker.mask_text(text) == masked
        assert masker.mask_text(f"{text}\n{text}") == f"{masked}\n{masked}"
        assert masker.mask_text(masked) == masked


def test_numbers_are_masked_in_the_formats_of_their_countries():
    formats = [(country, text) for country in FORMATS for text in FORMATS[country].split("|")]
    assert len(formats) >= 50 and len(FORMATS) == 10
    for country, text in formats:
        mask = Masker(["phone"], [country]).mask_text
        masked = mask(f"{text}, x")
        assert masked.endswith("<phone>, x") and not re.search(r"\d", masked), (country, text)
        assert mask(masked) == masked
        assert Masker(["phone"], []).mask_text(text) == text


def draw_text(draw: random.Random) -> str:
    """Return cases of all tables, cut and joined at random places."""
    tables = (EMAILS, ADDRESSES, PHONES, NATIONAL, ACCOUNTS)
    words = [word for table in tables for text, _ in list_cases(table) for word in text.split()]
    pieces = []
    for _ in range(draw.randint(1, 12)):
        word = draw.choice(words)
        cut = draw.randint(0, len(word)) if draw.random() < 0.3 else len(word)
        pieces.append(word[:cut] + draw.choice(["", " ", "\n", ".", "+", "@", "-", "é", "字", "1"]))
    return "".join(pieces)


@pytest.mark.parametrize("key", [b"", b"k" * 16], ids=["constant", "hash"])
def test_a_masked_text_has_no_match_and_its_neighbours_do_not_matter(key):
    draw = random.Random(0)
    masker = Masker(KINDS, ["US", "DE"], key)
    texts = [draw_text(draw) for _ in range(800)]
    masked = [masker.mask_text(text) for text in texts]
    assert [masker.mask_text(text) for text in masked] == masked
    assert any(one != two for one, two in zip(texts, masked, strict=True))
    encoded = [text.encode() for text in texts]
    together, hits = masker.mask_texts([*encoded, None])
    assert together == [*(text.encode() for text in masked), None]
    assert {row for rows in hits.rows.values() for row in rows} == {
        number for number, text in enumerate(texts) if masked[number] != text
    }
    lines = [[masker.mask_text(line) for line in text.split("\n")] for text in texts]
    assert ["\n".join(parts) for parts in lines] == masked


def test_only_the_neighbourhood_of_a_match_is_searched_again(monkeypatch):
    """In this line, each search finds one match; replacing it makes the next one possible."""
    places = 0
    check_place = masker._check_place

    def count_place(*arguments):
        nonlocal places
        places += 1
        return check_place(*arguments)

    monkeypatch.setattr(masker, "_check_place", count_place)
    text = Masker(["phone"], ["DE"]).mask_text("030 123 456 789 " * 250)
    assert text == "<phone> " * 250
    assert places < 20_000  # 125,000 if the whole line were searched again


def test_text_without_a_match_is_the_same_object():
    texts = [b"no match here: a@b, 1.2.3, +12, 4111", b"", "Grüße, 字".encode(), None]
    masked, hits = Masker(KINDS, ["US", "DE"]).mask_texts(texts)
    assert all(one is two for one, two in zip(masked, texts, strict=True)) and not hits.rows


def test_special_addresses_are_those_that_python_calls_not_global():
    draw = random.Random(0)
    for _ in range(20_000):
        address = ipaddress.IPv4Address(draw.getrandbits(32))
        expected = address.is_global and not address.is_multicast and not address.is_reserved
        known = address in ipaddress.IPv4Network("192.88.99.0/24")  # a relay that no longer exists
        assert addresses._is_public([*address.packed]) == (expected and not known)


def test_a_wrong_check_digit_is_no_match():
    masker = Masker(["iban", "card"], [])
    for text in ("GB82WEST12345698765432", "4111111111111111"):
        for number in range(4, len(text)):
            if text[number].isdigit():
                changed = str((int(text[number]) + 1) % 10)
                other = text[:number] + changed + text[number + 1 :]
                assert masker.mask_text(other) == other
    assert set(accounts._IBAN_LENGTHS.values()) <= set(range(15, 35))


def test_a_hash_is_equal_for_all_spellings_and_differs_by_key_and_kind():
    masker = Masker(KINDS, [], b"secret")
    one, two, three = (
        masker.mask_text(text) for text in ("+49 30 1234567", "+49301234567", "+49301234568")
    )
    assert one == two != three
    assert re.fullmatch("<phone:[a-p]{16}>", one)
    assert masker.mask_text("Joe@X.com") == masker.mask_text("joe@x.com")
    assert Masker(KINDS, [], b"other").mask_text("+49301234567") != one
    assert normalize_match("iban", b"DE89 3704\xc2\xa00044") == b"DE8937040044"


def test_shapes_show_neither_letters_nor_digits_of_a_match():
    shapes = {
        ("email", "joe.smith@mail.example.de"): "j…@m….de",
        ("email", "joe [at] example.com"): "j…@e….com",
        ("ip", "83.149.9.216"): "00.000.0.000",
        ("ip", "2001:4860::8888"): "0000:0000::0000",
        ("phone", "+49 (0)30 1234567"): "+00 (0)00 0000000",
        ("iban", "GB82WEST12345698765432"): "GB00AAAA00000000000000",
        ("card", "4111 1111 1111 1111"): "0000 0000 0000 0000",
    }
    for (kind, match), shape in shapes.items():
        assert describe_shape(kind, match.encode()) == shape


def test_matches_are_counted_by_kind_and_source():
    hits = MaskedMatches({"email": [0, 0, 2], "ip": [1]}, {"email": [(0, "a"), (2, "b")]})
    counts = count_matches(hits, ["one/a.txt", "two/x/b.txt", "c.txt"])
    assert counts["sources"] == {"one": {"email": 2}, "two": {"ip": 1}, "": {"email": 1}}
    assert counts["shapes"] == {"email": ["a", "b"]}
    total = add_counts(add_counts({}, counts), counts)
    assert sum_kinds(total) == {"email": 6, "ip": 2}
    assert rank_sources(total, "email") == {"one": 4, "(no directory)": 2}
    for number in range(2000):
        total = add_counts(total, {"sources": {f"s{number}": {"ip": 1}}, "shapes": {"ip": ["0"]}})
    assert sum_kinds(total) == {"email": 6, "ip": 2002}
    assert len(total["sources"]) < 1100 and len(total["shapes"]["ip"]) == 10
