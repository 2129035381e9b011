"""Measure a text for the quality rules in plain Python, one character and one word at a time."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter

from lib.curate.quality.word_lists import ENGLISH_LISTS

UNITS = ((0x0E00, 0x0EFF), (0x3041, 0x30FF), (0x4E00, 0x9FFF))  # enough for the texts of the tests
END_MARKS = ".!?。！？"
QUOTES = "\"'”’»」"
BULLETS = "-*•–"


def is_unit(character: str) -> bool:
    in_range = any(first <= ord(character) <= last for first, last in UNITS)
    return in_range and unicodedata.category(character)[0] in "LMN"


def split_words(text: str) -> list[str]:
    words = [""]
    for character in text:
        if is_unit(character):
            words += [character, ""]
        elif unicodedata.category(character)[0] in "LMN":
            words[-1] += character
        else:
            words.append("")
    return [word for word in words if word]


def count_words(words: list[str]) -> float:
    return sum(0.5 if is_unit(word[0]) else 1 for word in words)


def divide_or_zero(value: float, total: float) -> float:
    return value / total if total else math.nan


def has_phrase(words: list[str], phrase: str) -> bool:
    phrase_words = phrase.split()
    return any(words[i : i + len(phrase_words)] == phrase_words for i in range(len(words)))


def count_ellipses(text: str) -> int:
    return text.count("...") + text.count("…")


def count_sentences(line: str) -> int:
    sentences = 1
    for i, character in enumerate(line):
        if character in END_MARKS:
            after = i + 1
            after += line[after : after + 1] in QUOTES and after < len(line)
            rest = line[after:]
            is_wide = character in "。！？"
            if rest and (rest[0].isspace() or (is_wide and rest[0] not in END_MARKS)):
                sentences += 1
    return sentences


def list_repeats(items: list[str]) -> list[str]:
    return [item for i, item in enumerate(items) if item in items[:i]]


def share_characters(items: list[str]) -> float:
    return divide_or_zero(sum(map(len, list_repeats(items))), sum(map(len, items)))


def list_paragraphs(raw_lines: list[str]) -> list[list[str]]:
    paragraphs: list[list[str]] = [[]]
    for line in raw_lines:
        if line:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def list_grams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def measure_top(words: list[str], n: int) -> float:
    counts = Counter(list_grams(words, n))
    most = max(counts.values(), default=0)
    if most < 2:
        return 0
    longest = max(len("".join(gram)) for gram, count in counts.items() if count == most)
    return most * longest / len("".join(words))


def measure_repeated(words: list[str], n: int) -> float:
    seen = set()
    covered = set()
    for i, gram in enumerate(list_grams(words, n)):
        if gram in seen:
            covered |= set(range(i, i + n))
        seen.add(gram)
    return sum(len(words[i]) for i in covered) / len("".join(words))


def is_c4_line(line: str, end_marks: bool, min_words: int, longest: int) -> bool:
    words = split_words(line)
    return (
        (not end_marks or (line[-1] in END_MARKS + QUOTES and not line.endswith("...")))
        and count_words(words) >= min_words
        and max(map(len, line.split())) <= longest
        and not any(has_phrase(words, phrase) for phrase in ENGLISH_LISTS.phrases)
    )


def measure_text(original: str, end_marks: bool, min_words: int, longest: int) -> dict[str, float]:
    """Return all figures of a text by `family.figure`."""
    text = unicodedata.normalize("NFC", original).lower()
    words = split_words(text)
    count = count_words(words)
    spaced = [word for word in words if not is_unit(word[0])]
    has_spaces = len(spaced) >= count / 2
    tokens = text.split()
    raw_lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in raw_lines if line]
    paragraphs = list_paragraphs(raw_lines)
    texts = ["\n".join(paragraph) for paragraph in paragraphs]
    lengths = {"\n".join(paragraph): sum(map(len, paragraph)) for paragraph in paragraphs}
    figures = {
        "gopher.words": count,
        "gopher.word_length": divide_or_zero(len("".join(spaced)), len(spaced))
        if has_spaces
        else math.nan,
        "gopher.hash_signs": divide_or_zero(text.count("#"), count),
        "gopher.ellipses": divide_or_zero(count_ellipses(text), count),
        "gopher.bullet_lines": divide_or_zero(
            sum(line[0] in BULLETS for line in lines), len(lines)
        ),
        "gopher.ellipsis_lines": divide_or_zero(
            sum(line.endswith(("...", "…")) for line in lines), len(lines)
        ),
        "gopher.letter_words": divide_or_zero(
            sum(any(unicodedata.category(c)[0] == "L" for c in token) for token in tokens),
            len(tokens),
        ),
        "gopher.stop_words": len(set(words) & set(ENGLISH_LISTS.stop_words)),
        "gopher-repetition.duplicate_lines": divide_or_zero(len(list_repeats(lines)), len(lines)),
        "gopher-repetition.duplicate_line_characters": share_characters(lines),
        "gopher-repetition.duplicate_paragraphs": divide_or_zero(
            len(list_repeats(texts)), len(texts)
        ),
        "gopher-repetition.duplicate_paragraph_characters": divide_or_zero(
            sum(lengths[text] for text in list_repeats(texts)), sum(lengths[text] for text in texts)
        ),
        "c4.sentences": sum(
            count_sentences(line)
            for line in lines
            if is_c4_line(line, end_marks, min_words, longest)
        ),
        "c4.braces": text.count("{"),
        "c4.lorem_ipsum": int(has_phrase(words, "lorem ipsum")),
        "fineweb.end_mark_lines": divide_or_zero(
            sum(line[-1] in END_MARKS + QUOTES for line in lines), len(lines)
        ),
        "fineweb.short_lines": divide_or_zero(sum(len(line) <= 30 for line in lines), len(lines)),
        "fineweb.duplicate_line_characters": share_characters(lines),
        "fineweb.newlines": divide_or_zero(text.count("\n"), count),
    }
    judged = bool(words) and has_spaces
    for n in range(2, 11):
        name = f"top_{n}_gram" if n < 5 else f"duplicate_{n}_grams"
        share = measure_top if n < 5 else measure_repeated
        figures[f"gopher-repetition.{name}"] = share(words, n) if judged else math.nan
    return figures
