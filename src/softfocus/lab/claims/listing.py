"""What there is to run: the lines of `softfocus recipes`."""

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims.claim import SCALES
from softfocus.lab.recipes import loading


def lines() -> list[str]:
    """A line for each recipe and each claim, below a line that says how to run them."""
    recipes = [(name, loading.load(name)) for name in loading.shipped()]
    found = [(name, claims.load(name)) for name in claims.shipped()]
    width = 2 + max(len(name) for name, _ in (*recipes, *found))
    return [
        "Recipes: softfocus train NAME",
        *(f"  {name:{width}}{recipe.model.label}: {recipe.description}" for name, recipe in recipes),
        f"Claims: softfocus reproduce NAME --scale {'|'.join(SCALES)}",
        *(f"  {name:{width}}{claim.title} ({claim.source}){_remark(claim)}" for name, claim in found),
    ]


def _remark(claim: claims.Claim) -> str:
    """What keeps a claim from being run."""
    if claim.scales:
        return ""
    return ": decided by tests" if claim.exact else ": not testable here"
