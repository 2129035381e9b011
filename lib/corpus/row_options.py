"""Declare the options of stage 02 that decide which rows a dataset contains.

Stage 02 parses `RowOptions` from the command line and passes it to its workers. To add an option,
add a field to it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from lib.core import declared, options, paths
from lib.core.data_names import TRAIN, VALIDATION
from lib.core.declared import option
from lib.core.errors import Problems
from lib.corpus import encoding
from lib.corpus.extract import table
from lib.curate.masks import choices as mask_choices
from lib.curate.quality import thresholds

TEXT, CHAT = FORMATS = "text", "chat"  # formats of a dataset
EXACT = "exact"
NEAR = "near"
ONCE = "1"
UPSAMPLE = "upsample"
CORPUS = "corpus"
SOURCE = "source"
# Options that the search for near duplicates reads only after all signatures were computed.
NEAR_CHOICES = (
    *("near_threshold", "near_candidates", "near_members", "near_keep", "near_against"),
    "near_within",
)


@dataclass(frozen=True)
class RowOptions:
    """Declares the options that determine how documents become rows, and which rows are kept."""

    format: str = option(
        TEXT,
        group="rows",
        choices=FORMATS,
        quiet=True,
        help="`text`: one row of text per document; `chat`: one conversation per record "
        "(messages, prompt/completion, ShareGPT, alpaca) with separate turns",
    )
    fields: list[str] = option(
        [],
        parse=options.parse_names,
        action="extend",
        metavar="A,B.C",
        help="keep only these (dotted) keys of structured documents (default: every string)",
    )
    strings: str = option(
        "joined",
        choices=("joined", "rows"),
        help="join the strings of a document with newlines, or write a row per string",
    )
    min_chars: int = option(
        0,
        parse=options.count,
        help="drop rows with fewer characters (for a conversation, the sum over its turns)",
    )
    fallback_encoding: str | None = option(
        None,
        parse=encoding.parse_encoding_name,
        metavar="NAME",
        help="encoding, such as cp1252, for bytes that are neither UTF-8 nor UTF-16 (recognised by "
        "its byte order mark) (default: replace invalid bytes by U+FFFD)",
    )
    extract: list[str] = option(
        [],
        parse=table.parse_kinds,
        action="extend",
        metavar="KINDS",
        quiet=True,
        help="extract the text of these kinds of documents: html, pdf, docx, epub, separated by "
        "commas (default: none; HTML is read with its tags, and the others are skipped)",
    )
    extract_seconds: int = option(
        60,
        parse=options.positive_int,
        metavar="N",
        quiet=True,
        help="processor time in seconds that --extract may take for a file; a file that takes "
        "longer is skipped",
    )
    language: list[str] = option(
        [],
        parse=options.parse_names,
        action="extend",
        metavar="en,de",
        quiet=True,
        help="label rows with their language in a column `language`, and keep only rows with "
        "these labels; `und` is the label of rows that are too short or below --language-score; "
        "`all` labels the rows and drops none (default: no labels)",
    )
    language_model: Path = option(
        paths.classifiers_root(Path(".cache")) / "lid.176.ftz",
        parse=Path,
        metavar="FILE",
        quiet=True,
        help="fastText model that recognises languages; its labels are the values of --language",
    )
    language_score: float = option(
        0.65,
        parse=options.fraction,
        metavar="F",
        quiet=True,
        help="mean probability below which the language of a row is `und`",
    )
    quality_model: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        quiet=True,
        help="fastText classifier whose probability for --quality-label becomes a column `quality` "
        "(default: no scores)",
    )
    quality_label: str | None = option(
        None,
        metavar="NAME",
        quiet=True,
        help="label of good texts in --quality-model, with or without __label__ (default: hq)",
    )
    quality_score: float | None = option(
        None,
        parse=options.fraction,
        metavar="F",
        quiet=True,
        help="drop rows with a lower score of --quality-model (default: drop none)",
    )
    keep_top: float | None = option(
        None,
        parse=options.fraction,
        metavar="F",
        quiet=True,
        help="keep this fraction of the rows that pass all rules for single rows: the rows "
        "with the highest scores of --quality-model; takes two passes (default: keep all)",
    )
    dedup: str = option(
        "none",
        choices=("none", EXACT, NEAR),
        help="exact: drop rows that repeat the text of an earlier row (for conversations, its "
        "turns and tools); takes about 30 bytes of memory per row. near: also drop rows whose text "
        "is similar to that of a kept row; sorts on disk, in constant memory",
    )
    near_threshold: float = option(
        0.8,
        parse=options.fraction,
        metavar="F",
        quiet=True,
        help="lowest Jaccard similarity (shared ÷ all distinct word n-grams) of a near "
        "duplicate; the similarity is always computed exactly",
    )
    near_words: int = option(
        5,
        parse=options.positive_int,
        quiet=True,
        help="words in an n-gram; each character of Han, kana, Thai, Lao, Khmer and Myanmar is a "
        "word",
    )
    near_bands: int = option(
        20,
        parse=options.positive_int,
        quiet=True,
        help="bands of a MinHash signature; rows that agree in a band are compared. More bands "
        "find more pairs",
    )
    near_band_size: int = option(
        8,
        parse=options.positive_int,
        quiet=True,
        help="minima in a band; more minima find fewer pairs of low similarity",
    )
    near_candidates: int = option(
        32,
        parse=options.positive_int,
        quiet=True,
        help="maximum number of kept rows that a row is compared with",
    )
    near_members: int = option(
        1000,
        parse=options.positive_int,
        quiet=True,
        help="maximum number of kept rows that are remembered for each value of a band",
    )
    near_keep: str = option(
        ONCE,
        choices=(ONCE, UPSAMPLE),
        quiet=True,
        help="1: write a kept row once; upsample: repeat it according to the size of its cluster, "
        "as FineWeb-2 does (2 rows: 2 times, 3 or 4: 3, 5 to 99: 5, 100 to 999: 8, more: once)",
    )
    near_against: list[Path] = option(
        [],
        parse=Path,
        metavar="DIR",
        quiet=True,
        help="also drop rows that duplicate rows of this dataset, which was built with --dedup "
        "near; may be repeated (default: no other dataset)",
    )
    near_within: str = option(
        CORPUS,
        choices=(CORPUS, SOURCE),
        quiet=True,
        help="corpus: compare all rows; source: compare only rows whose files are in the same "
        "top-level directory of the source",
    )
    mask: list[str] = option(
        [],
        parse=mask_choices.parse_kinds,
        action="extend",
        metavar="KIND,…",
        quiet=True,
        help="replace personal data in the text: email, ip, phone, iban, card. All rules and "
        "--dedup see the text before it is masked (default: nothing)",
    )
    mask_phone_country: list[str] = option(
        [],
        parse=mask_choices.parse_countries,
        action="extend",
        metavar="US,DE",
        quiet=True,
        help="with --mask phone, also mask numbers in the national format of these countries, "
        "which have the code 1 or numbers that begin with 0 (default: only numbers with + and a "
        "country code)",
    )
    mask_with: str = option(
        mask_choices.CONSTANT,
        choices=mask_choices.REPLACEMENTS,
        quiet=True,
        help="constant: all e-mail addresses become <email>, and so on; hash: equal addresses "
        "become the same <email:…> (needs --mask-key)",
    )
    mask_key: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        quiet=True,
        help="file with a secret of at least 16 bytes for --mask-with hash (default: none)",
    )
    quality: list[str] = option(
        [],
        parse=thresholds.parse_families,
        action="extend",
        metavar="A,B",
        quiet=True,
        help=f"drop rows by published quality rules: {', '.join(thresholds.FAMILIES)}; the plan "
        "prints all thresholds. c4.min_sentences counts only the lines that C4 would keep "
        "(together with fineweb, also lines without an end mark), but a row is never cut (default: "
        "no rules)",
    )
    quality_set: list[str] = option(
        [],
        parse=thresholds.parse_settings,
        action="extend",
        metavar="NAME=X",
        quiet=True,
        help="replace thresholds of --quality, as in `gopher.min_words=30,c4.max_braces=off` "
        "(default: the published ones)",
    )
    quality_words: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        quiet=True,
        help="YAML or JSON file with stop words of other languages, and phrases by which C4 "
        "removes a line: `de: {stop_words: [der, die], phrases: [verwendet Cookies]}`. Without "
        "--language, the file contains one language, which applies to all rows (default: English)",
    )
    quality_except: list[str] = option(
        [],
        parse=options.parse_names,
        action="extend",
        metavar="A,B",
        quiet=True,
        help="do not apply the quality rules to these top-level directories of the source, such "
        "as code and chats (default: apply them to all)",
    )
    decontaminate: list[Path] = option(
        [],
        parse=Path,
        metavar="DIR",
        quiet=True,
        help="drop documents that contain a question of these test sets (JSON Lines with the key "
        "question, query, prompt or text, or a suite of stage 03); in conversations, only the "
        "turns of the user are compared; may be repeated (default: no test set)",
    )
    decontaminate_share: float = option(
        0.5,
        parse=options.fraction,
        metavar="F",
        quiet=True,
        help="drop a document if it contains at least this share of the n-grams (8 words) of a "
        "question",
    )
    decontaminate_report_only: bool = option(
        False,
        quiet=True,
        help="report the test questions that occur in documents, but do not drop the documents",
    )
    validation_percent: float = option(
        0.0,
        aliases=("validation_split_percentage",),
        parse=options.percent,
        metavar="P",
        help="percentage of the rows for a validation split, selected by a hash of their text "
        "(0: no validation split)",
    )
    keep_source: bool = option(
        False,
        help="add a column `source` with the relative path of the file (--format chat always "
        "includes it)",
    )

    @property
    def masks_later(self) -> bool:
        """Return whether rows are masked in the second pass, after near duplicates were found."""
        return bool(self.mask) and self.drops_near

    @property
    def drops_near(self) -> bool:
        """Return whether near duplicates are dropped."""
        return self.dedup == NEAR

    @property
    def has_two_passes(self) -> bool:
        """Return whether all rows must be known before the first one can be kept."""
        return self.drops_near or self.keep_top is not None

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)

    def require_consistent(self) -> None:
        """Raise UsageError if options exclude each other, or have no effect without another one."""
        problems = Problems()
        rows_only = (("--fields", self.fields), ("--strings", self.strings == "rows"))
        for name, is_given in rows_only if self.format == CHAT else ():
            if is_given:
                problems.add(
                    f"{name} and --format chat exclude each other",
                    expected=f"no {name}, because a conversation is kept complete",
                )
        needed = {}
        if not self.drops_near:
            needed["near_"] = f"--dedup {NEAR}"
        if not self.decontaminate:
            needed["decontaminate_"] = "--decontaminate DIR"
        if not self.extract:
            needed["extract_"] = "--extract"
        if not self.language:
            needed["language_"] = "--language"
        for field in declared.list_fields(RowOptions):
            for prefix, other in needed.items():
                is_given = getattr(self, field.name) != declared.default_of(field)
                if field.name.startswith(prefix) and is_given:
                    flag = declared.flag(field.name)
                    problems.add(f"{flag} needs {other}", expected=f"{other}, or no {flag}")
        problems.raise_if_any()


@dataclass(frozen=True)
class InputRowOptions(RowOptions):
    """The options of rows, and what the names in the input add to them.

    has_validation: some files are named as validation data, so there is a split of this name.
    """

    has_validation: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.has_validation else super().splits
