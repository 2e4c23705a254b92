"""Process groups of the factored mesh: one per distinct set of ranks, made once, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.axes import Placement, RankMesh

_worlds = count()


class RankGroups:
    """The process groups along sets of mesh axes, cached by rank tuple.

    Every rank of the world must ask for the same sets of axes in the same order, since making a group is a
    collective of the whole world. timeout: of the groups that are made; None for torch's.
    """

    def __init__(self, mesh: RankMesh, device: str = "cpu", timeout: timedelta | None = None) -> None:
        if dist.get_world_size() != mesh.world_size:
            raise ValueError(f"the mesh has {mesh.world_size} ranks, the world {dist.get_world_size()}")
        self.mesh, self.device, self._timeout = mesh, device, timeout
        self.rank = dist.get_rank()
        self.stage, self.place = divmod(self.rank, mesh.ranks_per_stage)
        # Torch keeps what it did with meshes by their ranks and names, and their groups by numbers that begin anew in
        # a new world: a mesh of it must not be taken for one of the world before.
        world = next(_worlds)
        self._dimensions = f"replicate{world}", f"shard{world}"
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(mesh.world_size)): dist.group.WORLD}
        self._meshes: dict[tuple[tuple[str, ...], tuple[str, ...]], DeviceMesh] = {}

    def _group(self, mine: tuple[int, ...], everyone: list[tuple[int, ...]]) -> dist.ProcessGroup:
        for ranks in everyone:
            if ranks not in self._groups:
                group = dist.new_group(list(ranks), timeout=self._timeout)
                if self.rank in ranks:
                    self._groups[ranks] = group
                else:
                    self._groups.setdefault(ranks, dist.GroupMember.NON_GROUP_MEMBER)
        return self._groups[mine]

    def along(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The group of the ranks of this stage that differ from this one only along `axes`."""
        everyone = [ranks for stage in range(self.mesh.pp) for ranks in self.mesh.groups(axes, stage)]
        return self._group(self.mesh.group(self.rank, axes), everyone)

    def mesh_along(self, shard: tuple[str, ...], replicate: tuple[str, ...] = ()) -> DeviceMesh:
        """The data-parallel ranks of this rank as fully_shard takes them: (shard) or (replicate, shard)."""
        key = (shard, replicate)
        if key not in self._meshes:
            group = self.along(shard)
            if replicate:
                across = self.mesh.group(self.rank, replicate)
                ranks = torch.tensor([self.mesh.group(rank, shard) for rank in across])
                self._meshes[key] = DeviceMesh.from_group(
                    [self.along(replicate), group], self.device, mesh=ranks, mesh_dim_names=self._dimensions
                )
            else:
                self._meshes[key] = DeviceMesh.from_group(group, self.device, mesh_dim_names=self._dimensions[1:])
        return self._meshes[key]

    def pipeline(self) -> dist.ProcessGroup:
        """The group of the ranks with this place on every stage, in stage order."""
        return self.across(tuple(range(self.mesh.pp)))

    def across(self, stages: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks with this place on these pipeline ranks (for ranks of those)."""
        width = self.mesh.ranks_per_stage
        everyone = [tuple(stage * width + place for stage in stages) for place in range(width)]
        return self._group(everyone[self.place], everyone)

    def prepare(
        self,
        placements: Iterable[Placement],
        extra: Iterable[tuple[str, ...]] = (),
        stages: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """Make all groups that these placements need, so that later calls are no collectives.

        extra: along more sets of axes; stages: across these pipeline ranks.
        """
        names = self.mesh.names
        sets = {names, *((name,) for name in names)}
        sets |= {
            axes
            for placed in placements
            for axes in (placed.tp, placed.sp, placed.dp, placed.dp_shard, placed.dp_replicate)
        }
        sets |= set(extra)
        for axes in sorted(sets - {()}):
            self.along(axes)
        if self.mesh.pp > 1:
            self.pipeline()
        for some in stages:
            self.across(some)
