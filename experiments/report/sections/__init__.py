"""What the pages of details say about each experiment, and which columns of its rows they show, in their order."""

from experiments.report.answers import verdict
from experiments.report.sections.accuracy import ACCURACY
from experiments.report.sections.drafts import DRAFTS
from experiments.report.sections.kernels import KERNELS
from experiments.report.sections.library import LIBRARY
from experiments.report.sections.section import Section, Table, having
from experiments.report.sections.simulations import SIMULATIONS
from experiments.report.sections.steps import STEPS

CLAIMS = (
    Section(
        r"claims-(C\d+)(?:-.*)?",
        "Claim {}",
        tables=(Table(("stated", "measured", "verdict"), "the verdict", having("verdict")),),
        answer=verdict,
    ),
)
PAGES = {  # file in results/ -> title and sections; the last takes what no section describes
    "kernels": ("Kernels", KERNELS),
    "accuracy": ("Accuracy", ACCURACY),
    "claims": ("Claims of the original system", CLAIMS),
    "steps": (
        "Whole steps, requests and the library itself",
        (*STEPS, *SIMULATIONS, *DRAFTS, *LIBRARY, Section(".*", "")),
    ),
}
