"""Which unit may start next. Pure: numbers in, a unit out.

Heavy units go first, so that none is left over to run alone at the end. A lighter one may fill the room beside, but only
as much as lets the heaviest waiting one start when the largest running one ends: so it cannot be starved.
"""


class Unit:
    """A unit that waits or runs. Sizes in bytes."""

    def __init__(self, number, name, size, *, kind="", architecture="", compiler=""):
        self.number = number
        self.name = name
        self.size = size
        """What it is expected to need."""
        self.kind = kind
        self.architecture = architecture
        self.compiler = compiler
        self.solo = False
        """Nothing may run beside it: the kernel has killed it once already."""
        self.attempts = 0
        self.began = 0.0
        self.rss = 0
        self.peak = 0
        self.cpu = {}
        self.killed = False
        """Killed by us, to be compiled again."""

    def held(self, budget):
        """What it has or is still expected to take."""
        return max(self.need(budget), self.rss)

    def need(self, budget):
        """What must be free for it. One that exceeds the whole budget gets all of it, so it runs alone."""
        return budget if self.solo else min(self.size, budget)


def pick(waiting, running, *, slots, budget, headroom, patient=True):
    """The unit that may start now, or None.

    `budget` is what all of ours may hold together, `headroom` what can really be taken at this moment; both leave the floor.
    With `patient` false a unit starts although others on the machine leave too little: waiting has not helped.
    """
    if not waiting or len(running) >= slots:
        return None
    holds = [unit.held(budget) for unit in running]
    held = sum(holds)
    growth = held - sum(unit.rss for unit in running)
    room = min(budget - held, headroom - growth)
    ordered = sorted(waiting, key=lambda unit: (-unit.need(budget), -unit.size, unit.number))
    head = ordered[0]
    if head.need(budget) <= room:
        return head
    largest = max(holds, default=0)
    for unit in ordered[1:]:
        later = held - largest + unit.need(budget) + head.need(budget)
        if unit.need(budget) <= room and (not running or later <= budget):
            return unit
    return ordered[-1] if not running and not patient else None


def victim(running, headroom):
    """The unit to give up when memory falls below the floor: the youngest of several, which loses the least work."""
    if headroom >= 0 or len(running) < 2:
        return None
    return max(running, key=lambda unit: unit.began)
