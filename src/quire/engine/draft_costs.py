"""DraftCosts: the measured time of further rows and of draft tokens, from which follows how many of them pay."""

from __future__ import annotations

NEWEST = 0.05  # weight of the last measurement in means
OUTLIER = 3.0  # a measurement counts as at most that multiple of the mean
USUAL_ROW = 1 / 12  # assumed time of a further row, in steps of no row, until steps of different sizes were measured
LEAST_WEIGHT, MOST_WEIGHT = 8.0, 1000.0  # of earlier measurements of the slope: squares of differences in rows


class DraftCosts:
    """Learns seconds = a + b * rows of the steps in which all requests decode, and the seconds of a draft token.

    The means of rows and seconds forget old steps. The slope b changes only by steps whose rows differ from the mean.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0  # means
        self.row = 0.0  # b, seconds of a further row
        self._weight = LEAST_WEIGHT
        self._draft: float | None = None  # seconds

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step, without that of drafting."""
        if not self._seconds:
            self._rows, self._seconds = float(num_rows), seconds
            self.row = seconds * USUAL_ROW / (1 + USUAL_ROW * num_rows)
            return
        rows, time = num_rows - self._rows, min(seconds, OUTLIER * self._seconds) - self._seconds
        self.row = max(0.0, self.row + rows * (time - self.row * rows) / (self._weight + rows * rows))
        self._weight = min(MOST_WEIGHT, self._weight + rows * rows)
        self._rows += NEWEST * rows
        self._seconds += NEWEST * time

    def observe_drafts(self, count: int, seconds: float) -> None:
        """Record the time of that number of draft tokens."""
        known = seconds / count if self._draft is None else self._draft
        self._draft = known + NEWEST * (seconds / count - known)

    @property
    def knows_drafts(self) -> bool:
        """True if the time of draft tokens was measured."""
        return self._draft is not None

    @property
    def price(self) -> float:
        """Seconds of a draft token and its row."""
        return self.row + (self._draft or 0.0)

    def step(self, num_rows: int) -> float:
        """Return the seconds of a step of `num_rows` rows."""
        return max(self._seconds / OUTLIER, self._seconds + self.row * (num_rows - self._rows)) or 1.0
