"""OmegaConf resolvers: arithmetic between keys, e.g. `${share_of:0.05,${training.steps}}`."""

from omegaconf import OmegaConf

from titan_exp.config.errors.did_you_mean import divisors, listed, nearest_numbers
from titan_exp.config.secrets.variables import register_secret_resolvers


def share_of(fraction: float, whole: float) -> int:
    """Rounded fraction of a whole number: at least 1 unless the fraction is 0, at most the whole."""
    return min(max(round(fraction * whole), 1 if fraction else 0), int(whole))


def rest_of(whole: float, part: float) -> int:
    """Difference of a whole and a part, at least 0."""
    return max(int(whole) - int(part), 0)


def quotient(dividend: int, divisor: int) -> int:
    """Exact division; a ValueError names the nearest divisors."""
    if divisor == 0 or dividend % divisor:
        near = listed(nearest_numbers(divisor, divisors(abs(int(dividend))), 2))
        raise ValueError(f"{dividend} is not a multiple of {divisor}, but of {near}")
    return int(dividend) // int(divisor)


def register_resolvers() -> None:
    """Register the resolvers; idempotent."""
    for function in (share_of, rest_of, quotient):
        OmegaConf.register_new_resolver(function.__name__, function, replace=True)
    register_secret_resolvers()
