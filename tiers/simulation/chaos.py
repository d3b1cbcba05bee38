"""Who cuts, kills and stops in a simulated world, and when it ends.

Chaos acts at exponentially distributed virtual times with the means that the knobs name, until
`calm` is called or planned with `until`. Then everything heals: links mend, stopped processes
resume, dead ones start, disks and reads break no more. Liveness is judged only after that.
"""

from collections.abc import Callable, Sequence

from .disk import Disk
from .knobs import Knobs
from .network import Network
from .process import Process, ProcessState
from .remote_memory import RemoteMemory
from .world import World

AGAIN_SHARE = 0.5
"""Of kills that another follows about when the first is up again: deaths come together, and what
one recovers from, the next finds half done."""


class Chaos:
    """The adversary of one world."""

    def __init__(
        self,
        world: World,
        knobs: Knobs,
        *,
        networks: Sequence[Network],
        processes: Sequence[Process],
        disks: Sequence[Disk] = (),
        memory: RemoteMemory | None = None,
    ) -> None:
        self.active = True
        self.kills = self.pauses = self.partitions = 0
        self._world, self._knobs, self._networks = world, knobs, tuple(networks)
        self._processes, self._disks, self._memory = tuple(processes), tuple(disks), memory
        self._random = world.fork("chaos")
        world.note("chaos", knobs.text())
        for process in self._processes:
            self._plan(knobs.process.kill_gap_s, lambda p=process: self._kill(p))
            self._plan(knobs.process.pause_gap_s, lambda p=process: self._pause(p))
        self._plan(knobs.link.partition_gap_s, self._partition)

    def _mean(self, mean_s: float) -> float:
        return self._random.expovariate(1 / mean_s)

    def _plan(self, gap_s: float, act: Callable[[], None]) -> None:
        if gap_s > 0:
            self._world.at(self._mean(gap_s), lambda: self._act(gap_s, act), "chaos")

    def _act(self, gap_s: float, act: Callable[[], None]) -> None:
        if self.active:
            act()
            self._plan(gap_s, act)

    def _kill(self, process: Process) -> None:
        if process.state is not ProcessState.DOWN:
            self.kills += 1
            process.kill()
            self._world.at(self._mean(self._knobs.process.down_s), process.start, "restart")
            if self._random.random() < AGAIN_SHARE:
                other = self._random.choice(self._processes)
                delay_s = self._mean(2 * self._knobs.process.down_s)
                self._world.at(delay_s, lambda: self._kill_again(other), "kill again")

    def _kill_again(self, process: Process) -> None:
        if self.active:
            self._kill(process)

    def _pause(self, process: Process) -> None:
        if process.state is ProcessState.RUNNING:
            self.pauses += 1
            process.pause()
            self._world.at(self._mean(self._knobs.process.pause_s), process.resume, "resume")

    def _partition(self) -> None:
        names = [process.name for process in self._processes]
        if len(names) < 2:
            return
        self.partitions += 1
        self._random.shuffle(names)
        split = self._random.randrange(1, len(names))
        left, right = names[:split], names[split:]
        one_way = self._random.random() < 0.5
        for network in self._networks:
            if one_way:
                network.cut(left[0], right[0])
            else:
                network.partition(left, right)
        self._world.at(self._mean(self._knobs.link.partition_s), self._heal, "heal")

    def _heal(self) -> None:
        for network in self._networks:
            network.heal()

    def until(self, delay_s: float) -> None:
        """Plan the end of all faults."""
        self._world.at(delay_s, self.calm, "calm")

    def calm(self) -> None:
        """End all faults and heal what can heal."""
        self.active = False
        self._world.note("chaos", "ends: everything heals")
        for network in self._networks:
            network.calm()
        for disk in self._disks:
            disk.calm()
        if self._memory is not None:
            self._memory.calm()
        for process in self._processes:
            process.resume()
            process.start()
