"""What a search may have missed, in words."""

from quartet_plugin.model.regret import NOTABLE, Regret
from quartet_plugin.report.words import clean


def regret_lines(regret: Regret) -> list[str]:
    """The estimate in up to three lines, the first one the figure."""
    if regret.num_untried == 0:
        return ["regret    none: every plan of the space was tried"]
    return [
        f"regret    {_figure(regret)}",
        f"          most likely {clean(regret.likely or '', limit=200)}: the best in "
        f"{100 * regret.likely_chance:.0f} % of the draws",
        f"          {_basis(regret)}",
    ]


def regret_words(regret: Regret) -> str:
    """The same as one paragraph."""
    if regret.num_untried == 0:
        return "Every plan of the space was tried, so no other is left to be faster."
    likely = clean(regret.likely or "", limit=200)
    figure, basis = _figure(regret), _basis(regret)
    return (
        f"{figure[:1].upper()}{figure[1:]}. Most likely it would be {likely}, the best in "
        f"{100 * regret.likely_chance:.0f} % of the draws. {basis[:1].upper()}{basis[1:]}."
    )


def _figure(regret: Regret) -> str:
    gain = regret.gain
    return (
        f"an untried plan may be faster by about {100 * gain.median:.1f} % ({100 * gain.low:.1f} to "
        f"{100 * gain.high:.1f} %), by more than {100 * NOTABLE:.0f} % with a chance of "
        f"{100 * regret.notable:.0f} %"
    )


def _basis(regret: Regret) -> str:
    how = {
        "calibrated cost model": "predicted by the cost model as the trials calibrated it",
        "measured trials": "judged by the plans that were measured and how alike they are",
    }.get(regret.source, regret.source)
    return f"{regret.num_untried} untried plans, {how} ({regret.num_measured} measured)"
