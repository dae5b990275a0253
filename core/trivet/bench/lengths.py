"""Lengths of prompts and outputs, drawn from distributions with the means of published data sets.

The data sets themselves are not needed: what a memory study depends on is how long requests are and how much that
varies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from trivet.plan import Int32


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Prompts and outputs, independent of each other, lognormal.

    ``spread`` is the standard deviation over the mean, the same for prompts and outputs."""

    name: str
    mean_prompt: float
    mean_output: float
    spread: float

    @property
    def mean_held(self) -> float:
        """Tokens that a running request holds on average over time: its prompt, and of its output
        E[output²] / (2 E[output]), since long outputs run longer."""
        return self.mean_prompt + self.mean_output * (1 + self.spread**2) / 2

    def draw(self, count: int, max_model_len: int, seed: int) -> tuple[Int32, Int32]:
        """``([count], [count])`` lengths of prompts and outputs, each at least 1, together at most ``max_model_len``
        (the prompt at most half of that, if both are long).

        The draw is stratified: one value from each of ``count`` equally likely parts of the distribution, in random
        order. So the means are met closely with a few hundred requests, long tails and all."""
        rng = np.random.default_rng(seed)
        prompts, outputs = (self._draw(mean, count, rng) for mean in (self.mean_prompt, self.mean_output))
        outputs = np.clip(outputs, 1, max_model_len - 1)
        prompts = np.clip(prompts, 1, np.maximum(max_model_len - outputs, max_model_len // 2))
        outputs = np.minimum(outputs, max_model_len - prompts)
        return prompts, outputs

    def _draw(self, mean: float, count: int, rng: np.random.Generator) -> Int32:
        sigma = math.sqrt(math.log1p(self.spread**2))
        underlying = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
        parts = rng.permutation((np.arange(count) + rng.uniform(1e-9, 1, count)) / count)
        values = np.exp([underlying.inv_cdf(part) for part in parts.tolist()])
        lengths: Int32 = np.rint(values).astype(np.int32)
        return lengths


#: By name. The means are those of the PagedAttention paper (Kwon et al., SOSP 2023, arXiv 2309.06180, section 6.1). The
#: spread follows from its figure 2: with max reservations 7 requests of 2048 tokens fit into 15.7K, and they hold 20.4%
#: of it, 457 tokens each. That is ``mean_held`` for a standard deviation of 0.87 times the mean.
LENGTHS = {
    "sharegpt": LengthDistribution("sharegpt", 161.31, 337.99, 0.87),
    "alpaca": LengthDistribution("alpaca", 19.31, 58.45, 0.87),
}
