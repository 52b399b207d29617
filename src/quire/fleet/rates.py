"""StepRates: estimates of a replica's step times, fitted to the steps that it computed."""

from __future__ import annotations

from quire.errors import BadValue, check_integer, check_number

# Assumption until steps of different sizes were observed: the fixed part of a step costs as much as these.
STEP_IN_PROMPT_TOKENS = 256
STEP_IN_SEQUENCES = 32
MEMORY = 100  # steps; older ones fade
KEPT = 1.0  # steps: weight of earlier knowledge about a kind of step that no longer occurs
WARM_UP = 8  # steps; the slowest quarter of these is left out, since the first ones fill caches
MOST_RESIDUALS = 3.0  # residuals are clipped to this multiple of the usual size
NOISE_MEMORY = 10  # steps over which the usual size of a residual is averaged
# Share of a step's expected seconds: no residual up to three times this is unusual. Among steps that only decode, one
# with a prompt must not count as an outlier.
LEAST_NOISE = 1 / 3
PRIOR = 1e-3  # weight, in steps, of the assumption above

Vector = tuple[float, float, float]


class StepRates:
    """The fit of t = a + b * prompt tokens + c * sequences to the seconds of a replica's steps.

    Recursive least squares with exponential forgetting. Its information matrix never falls below a small multiple of
    the unit matrix: a thousand steps that only decode do not change the rate of prompts, and leave it as easy to
    correct as if a single step had shown it. A residual counts in proportion to the step's load and is clipped at a few
    times the usual one: one step during which the machine was suspended hardly matters, while ten in a row are
    believed. No coefficient becomes negative.

    Costs that the steps do not separate are divided as if a step's fixed part cost as much as 256 prompt tokens or 32
    sequences. A kind that was never observed gets the rate of the other one: a prompt token that of a sequence and the
    reverse, as both are one row of the model. All rates are 0.0, which means unknown, for the first few steps.
    """

    def __init__(self) -> None:
        # Scaled so that all three coefficients have the same magnitude: a, 256 b, 32 c.
        self._rates: Vector = (0.0, 0.0, 0.0)
        self._information = [[PRIOR if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._noise = 0.0  # usual size of a residual, in seconds per unit of load
        self._first: list[tuple[float, Vector]] | None = []  # steps before the fit begins; None: it has begun
        self._seen_prompt = self._seen_sequences = False

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """Update the fit with a step.

        prompt_tokens: computed in it. sequences: decoded in it. seconds: its duration. A step with neither tokens nor
        sequences is ignored. Raises BadValue for a negative number or one that is not finite.
        """
        check_integer(BadValue, "prompt_tokens", prompt_tokens, 0)
        check_integer(BadValue, "sequences", sequences, 0)
        check_number(BadValue, "seconds", seconds, 0.0)
        if prompt_tokens == 0 and sequences == 0:
            return
        self._seen_prompt = self._seen_prompt or prompt_tokens > 0
        self._seen_sequences = self._seen_sequences or sequences > 0
        prompt, decode = prompt_tokens / STEP_IN_PROMPT_TOKENS, sequences / STEP_IN_SEQUENCES
        load = 1.0 + prompt + decode  # residuals grow with the load
        x, y = (1.0 / load, prompt / load, decode / load), seconds / load
        if self._first is None:
            self._fit(x, y)
            return
        self._first.append((y, x))
        if len(self._first) == WARM_UP:
            usual = sorted(self._first)[: WARM_UP * 3 // 4]
            self._first = None
            middle = usual[len(usual) // 2][0]
            self._rates, self._noise = (middle, middle, middle), middle
            for y, x in usual:
                self._fit(x, y)

    @property
    def seconds_a_step(self) -> float:
        """Fixed seconds of each step."""
        return self._rates[0]

    @property
    def seconds_a_prompt_token(self) -> float:
        """Seconds of each prompt token that a step computes."""
        return self._prompt() if self._seen_prompt else self._sequence()

    @property
    def seconds_a_sequence(self) -> float:
        """Seconds of each sequence that decodes in a step."""
        return self._sequence() if self._seen_sequences else self._prompt()

    def _prompt(self) -> float:
        return self._rates[1] / STEP_IN_PROMPT_TOKENS

    def _sequence(self) -> float:
        return self._rates[2] / STEP_IN_SEQUENCES

    def _fit(self, x: Vector, y: float) -> None:
        """Move the rates towards a step that took y seconds per unit of load."""
        information = self._information
        for i, row in enumerate(information):
            for j in range(3):
                row[j] += x[i] * x[j] - row[j] / MEMORY
            row[i] += KEPT / MEMORY
        expected = sum(a * b for a, b in zip(self._rates, x, strict=True))
        usual = max(self._noise, LEAST_NOISE * expected)
        most = MOST_RESIDUALS * usual
        residual = min(max(y - expected, -most), most)
        self._noise = usual + (abs(residual) - usual) / NOISE_MEMORY
        covariance = _inverse(information)
        gain = [sum(row[j] * x[j] for j in range(3)) for row in covariance]
        self._rates = _not_negative(
            [rate + part * residual for rate, part in zip(self._rates, gain, strict=True)], covariance
        )


def _not_negative(rates: list[float], covariance: list[list[float]]) -> Vector:
    """Raise a negative rate to 0, and shift the others according to the covariance."""
    worst = min(range(3), key=rates.__getitem__)
    if rates[worst] < 0.0:
        shift = rates[worst] / covariance[worst][worst]
        rates = [rate - row[worst] * shift for rate, row in zip(rates, covariance, strict=True)]
    a, b, c = (max(0.0, rate) for rate in rates)
    return a, b, c


def _inverse(m: list[list[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric positive definite matrix [3, 3], by cofactors."""
    (a, b, c), (_, d, e), (_, _, f) = m
    aa, ab, ac = d * f - e * e, c * e - b * f, b * e - c * d
    scale = 1.0 / (a * aa + b * ab + c * ac)
    bb, bc, cc = a * f - c * c, b * c - a * e, a * d - b * b
    return [
        [aa * scale, ab * scale, ac * scale],
        [ab * scale, bb * scale, bc * scale],
        [ac * scale, bc * scale, cc * scale],
    ]
