"""What a unit is expected to need, by what is known of it and of its like."""

_KINDS = {"cuda": 3_000_000_000, "c++": 1_500_000_000, "c": 300_000_000, "link": 1_000_000_000}
"""What a unit is taken to need when nothing is known of it (bytes): more than most, less than the heaviest."""


def margin(peak):
    """Peaks differ little from one run to the next, and are sampled."""
    return peak + peak // 20 + 50_000_000


class Sizes:
    """Peaks (bytes) by "name|architecture|compiler"."""

    def __init__(self, known):
        self._known = known
        self._like = {}
        for key, peak in known.items():
            name, architecture, _ = key.split("|")
            for like in ((name, architecture), name):
                self._like[like] = max(peak, self._like.get(like, 0))

    def expected(self, name, architecture, compiler, kind):
        """Bytes to set aside: this very unit's, else another compiler's, else another architecture's, else its kind's."""
        peak = self._known.get(f"{name}|{architecture}|{compiler}") or self._like.get((name, architecture))
        peak = peak or self._like.get(name)
        return margin(peak) if peak else _KINDS[kind]
