# covers: lib/curate/classify/model_file.py, lib/curate/classify/predictor.py
# covers: lib/curate/classify/language.py, lib/curate/classify/top_scores.py
# covers: lib/curate/steps/language.py, lib/curate/steps/quality_model.py
"""fastText models are checked before they are opened; texts get labels and scores."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import ArtifactError, StageError, UsageError
from lib.curate.classify import language, model_file, predictor, top_scores
from lib.curate.steps.language import LanguageLabels, LanguageOptions
from lib.curate.steps.quality_model import QualityScores, ScoreOptions, score_texts
from tests.conftest import ROOT
from tests.fasttext_models import LANGUAGES, QUALITY, write_classifier, write_tree_classifier

ENGLISH = "The house is of stone and the garden is with roses. "
GERMAN = "Das Haus ist aus Stein und der Garten ist mit Rosen. "
DENSE = {"bucket": 3, "longest": 2}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """Return a model of languages and a model of quality."""
    return {
        "languages": write_classifier(tmp_path / "languages.bin", LANGUAGES),
        "quality": write_classifier(tmp_path / "quality.bin", QUALITY),
    }


@pytest.mark.parametrize("form", [{}, DENSE, {"is_quantised": True}, None])
def test_a_model_opens_and_damage_is_refused_before_it_is_opened(form, tmp_path):
    """Damage that is not refused may change values, but fastText must survive it."""
    path = tmp_path / "a.bin"
    if form is None:
        write_tree_classifier(path)
    else:
        write_classifier(path, LANGUAGES, **form)
    labels = ["de", "en", "zz", "fr", "ru", "aa"] if form is None else list(LANGUAGES)
    assert model_file.read_labels(path, "--m") == labels
    content = path.read_bytes()
    for size in (*range(0, len(content), 37), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ArtifactError, match="fastText classifier"):
            model_file.read_labels(path, "--m")
    path.write_bytes(content + b"x")
    with pytest.raises(ArtifactError):
        model_file.read_labels(path, "--m")

    draw = np.random.default_rng(0)
    survivors = []
    for number in range(300):
        damaged = bytearray(content)
        for place in draw.integers(0, min(len(content), 600), 2):
            damaged[place] = int(draw.integers(256))
        damaged_path = tmp_path / f"{number}.bin"
        damaged_path.write_bytes(damaged)
        try:
            model_file.read_labels(damaged_path, "--m")
            survivors.append(str(damaged_path))
        except ArtifactError:
            pass
    assert survivors
    code = (
        "import sys, fasttext\n"
        "for path in sys.argv[1:]: fasttext.load_model(path).predict('the und foo', -1, 0.0)"
    )
    child = subprocess.run([sys.executable, "-c", code, *survivors], capture_output=True)
    assert child.returncode == 0, child.stderr.decode()


@pytest.mark.parametrize(
    ("change", "description"),
    [
        ({"kind": 1}, "word vectors"),
        ({"loss": 9}, "unknown loss"),
        ({"longest": 3}, "no rows for them"),
        ({"longest": -1}, "longest n-gram has -1 characters"),
    ],
)
def test_a_model_of_another_kind_is_refused(change, description, tmp_path):
    path = write_classifier(tmp_path / "a.bin", LANGUAGES, **change)
    with pytest.raises(ArtifactError) as error:
        model_file.read_labels(path, "--m")
    assert description in error.value.found


def test_an_index_of_rows_that_do_not_exist_is_refused(tmp_path):
    content = write_classifier(tmp_path / "a.bin", QUALITY, is_quantised=True).read_bytes()
    sizes = struct.pack("<3i2q", 4, 2, 2, 1, 0)
    entries = content.index(sizes) + len(sizes)
    end = content.rindex(b"__label__cc\0") + len(b"__label__cc\0") + 9
    pruned = content.replace(sizes, struct.pack("<3i2q", 4, 2, 2, 1, 1))
    path = tmp_path / "b.bin"
    path.write_bytes(pruned[:end] + struct.pack("<2i", 7, 5) + pruned[end:])
    assert entries < end
    with pytest.raises(ArtifactError) as error:
        model_file.read_labels(path, "--m")
    assert "index of n-grams" in error.value.found


def test_languages_of_texts(models):
    """A cut of 500 characters counts like any other, capitals and newlines do not matter."""
    texts = {
        ENGLISH: "en",
        GERMAN * 100: "de",
        GERMAN.upper(): "de",
        ENGLISH.replace(" ", "\n"): "en",
        "und die": "und",
        "1234567890 " * 200: "und",
        "foo bar " * 100: "und",
        "": "und",
        ENGLISH + "\ud800": "en",
        GERMAN * 8 + ENGLISH * 100: "en",  # two of three cuts
        "the und " * 40: "und",  # 0.5 for each
    }
    classifier = predictor.load_line_classifier(models["languages"])
    labels = language.find_languages(classifier, [*texts], 0.65)
    assert dict(zip(texts, labels, strict=True)) == texts
    assert language.find_languages(classifier, ["the und " * 40], 0.3) == ["de"]


def test_lines_get_the_scores_of_the_library(tmp_path):
    path = write_tree_classifier(tmp_path / "a.ftz")
    classifier = predictor.load_line_classifier(path)
    assert classifier.labels == ["aa", "de", "en", "fr", "ru", "zz"]
    lines = ["the und дом", "漢字 é", "", "the\nund", "a \ud800"]
    for least in (0.0, 0.2):
        for row, line in zip(classifier.score_lines(lines, least), lines, strict=True):
            expected = dict(predictor.list_scores(path, line, least))
            assert dict(zip(classifier.labels, row, strict=True)) == pytest.approx(
                dict.fromkeys(classifier.labels, 0) | expected
            )


def test_a_model_with_nan_is_refused(tmp_path):
    path = write_tree_classifier(tmp_path / "a.ftz")
    content = path.read_bytes()
    place = len(content) - 4 * 5 * 6  # the first weight of the tree
    path.write_bytes(content[:place] + struct.pack("<f", np.nan) + content[place + 4 :])
    with pytest.raises(ArtifactError, match="damaged"):
        predictor.load_line_classifier(path).score_lines(["the"], 0.0)


def test_cuts_are_start_middle_and_end():
    text = "a" * 700 + "b" * 800 + "c" * 700
    assert language.cut_text(text) == ["a" * 500, "b" * 500, "c" * 500]
    assert language.cut_text("x" * 1500) == ["x" * 1500]


def test_scores_of_texts(models):
    texts = ["good " * 30, "bad bad", "good\nbad", "unknown", "", "good \udfff"]
    model = models["quality"]
    expected = [1, 0, 0.5, 0, 0, 1]
    assert score_texts(model, "hq", texts) == pytest.approx(expected, abs=1e-3)
    assert score_texts(model, "__label__cc", texts[:2]) == pytest.approx([0, 1], abs=1e-3)


def make_labels(**options: object) -> LanguageLabels | None:
    return LanguageLabels.from_options(LanguageOptions(**options))


def make_scores(**options: object) -> QualityScores | None:
    return QualityScores.from_options(ScoreOptions(**options))


def catch_error(make: Callable[..., object], **options: object) -> StageError:
    with pytest.raises(StageError) as error:
        make(**options)
    return error.value


def test_options_of_languages_are_checked(models, tmp_path):
    model = models["languages"]
    for names in (["en", "de"], ["all"], ["en", "und"]):
        assert make_labels(language=names, language_model=model)
    assert make_labels() is None
    error = catch_error(make_labels, language_score=0.5)
    assert "--language-score needs --language" in error.problem
    error = catch_error(make_labels, language=["en", "dee"], language_model=model)
    assert "no label dee" in error.problem
    assert "en, fr" in error.expected
    error = catch_error(make_labels, language=["all", "de"], language_model=model)
    assert "combined with languages" in error.problem
    error = catch_error(make_labels, language=["de"], language_model=tmp_path / "x.bin")
    assert isinstance(error, ArtifactError) and not error.run
    known = Path(shutil.copy(model, tmp_path / "lid.176.ftz"))
    error = catch_error(make_labels, language=["de"], language_model=known)
    assert "a different model" in error.problem


def test_options_of_quality_are_checked(models):
    model = models["quality"]
    assert make_scores(quality_model=model)
    assert make_scores(quality_model=model, quality_label="cc", keep_top=0.1)
    assert make_scores() is None
    error = catch_error(make_scores, keep_top=0.1, quality_label="cc")
    assert [cause.problem for cause in error.several] == [
        "--quality-label needs --quality-model FILE",
        "--keep-top needs --quality-model FILE",
    ]
    for options in ({"keep_top": 0.1, "quality_score": 0.5}, {"keep_top": 0.0}):
        assert isinstance(catch_error(make_scores, quality_model=model, **options), UsageError)
    error = catch_error(make_scores, quality_model=models["languages"])
    assert "no label hq" in error.problem and error.expected == "en, de, fr"


def test_the_package_is_named_if_it_is_missing(models, monkeypatch):
    monkeypatch.setattr(predictor.importlib.util, "find_spec", lambda name: None)
    for error in (
        catch_error(make_labels, language=["de"]),
        catch_error(make_scores, quality_model=models["quality"]),
    ):
        assert "fasttext-predict" in error.problem
        assert "fasttext-predict==0.9.2.4" in error.run
        assert (ROOT / "requirements-optional.txt").read_text().count("fasttext-predict") == 1


def test_labels_in_other_forms_are_recognised_in_errors():
    known = {"en", "de", "und", "zh-cn"}
    for name in ("EN", "en-US", "en_GB", "__label__en"):
        assert language._find_near_labels(name, known) == ["en"]
    assert language._find_near_labels("zh-CN", known) == ["zh-cn"]
    assert language._find_near_labels("xx", known) == []


@pytest.mark.parametrize("count", [1, 2, 499, 500, 777, 1000])
def test_the_highest_scores_are_found_without_sorting(count):
    draw = np.random.default_rng(count)
    values = draw.choice(draw.random(200, np.float32), 1000).astype(np.float32)
    values[draw.integers(0, 1000, 300)] = draw.choice([0, 1, 1e-5])
    blocks = np.split(values, [10, 64, 900])
    threshold = top_scores.find_threshold(lambda: blocks, count)
    selector = top_scores.Selector(threshold)
    chosen = np.concatenate([selector.select(block) for block in blocks])
    best = np.argsort(-values, kind="stable")[:count]
    assert np.flatnonzero(chosen).tolist() == sorted(best.tolist())
    assert threshold.score == values[best[-1]]


def test_scores_are_counted_in_bins():
    counts = top_scores.count_bins(np.array([0, 0.04, 0.05, 0.5, 1, 1.00001], np.float32))
    assert counts.tolist() == [2, 1, *[0] * 8, 1, *[0] * 8, 2]


def test_the_share_of_rows_is_rounded():
    counts = [top_scores.count_kept(rows, share) for rows, share in ((30, 0.1), (3, 0.5), (4, 0.1))]
    assert counts == [3, 2, 1]
    assert top_scores.count_kept(0, 0.5) == 0
