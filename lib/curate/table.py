"""List the steps of a curation, in the order in which they look at a row.

To add a filter, write a subclass of CurationStep, and name it here.
"""

from __future__ import annotations

from lib.curate.step import CurationStep
from lib.curate.steps.decontaminate import Decontamination
from lib.curate.steps.duplicates import Duplicates
from lib.curate.steps.language import LanguageLabels
from lib.curate.steps.masks import Masks
from lib.curate.steps.own_filter import OwnFilters
from lib.curate.steps.quality import QualityRules
from lib.curate.steps.quality_model import QualityScores

STEPS: tuple[type[CurationStep], ...] = (
    OwnFilters,
    LanguageLabels,
    QualityRules,
    QualityScores,
    Decontamination,
    Duplicates,
    Masks,
)
