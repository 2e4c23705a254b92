"""The candidates of one search: what the tables propose, as plans with their predictions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import autopar
from autopar.cuts import CutTables
from autopar.finalists import SOLVER, Finalist, objective_ns, peak_bytes
from autopar.ledger import OverBudgetError
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Certificate, Plan, PlanCluster, PlanModel, RankMemory
from autopar.polish import Columns, Cuts
from autopar.predict import Known, predict, rank_memory
from autopar.price import INFEASIBLE, score
from autopar.refuted import Refutation
from autopar.request import Request, Schedule
from autopar.solvers.pipeline import TableChoice


class Pool:
    """The candidates that were simulated so far, and what it takes to simulate one."""

    def __init__(self, *, model_file: ModelFile, cluster_file: ClusterFile, request: Request, made: CutTables) -> None:
        self.model_file, self.cluster_file, self.request, self.made = model_file, cluster_file, request, made
        self.budget_bytes = request.memory_bytes or cluster_file.cluster.usable_bytes
        self.found: dict[tuple[int, Cuts, Columns, Schedule], Finalist] = {}
        self.bounding: TableChoice | None = None
        self._known = Known()
        self._over: set[tuple[int, int, int, Columns, Schedule]] = set()
        model, cluster = model_file.model, cluster_file.cluster
        self._model = PlanModel(
            name=model.name, source=model.source, fingerprint=model.fingerprint, profile=model_file.fingerprint
        )
        self._cluster = PlanCluster(
            name=cluster.name,
            device=cluster.device,
            world_size=cluster.world_size,
            ranks_per_node=cluster.ranks_per_node,
            memory_bytes=cluster.memory_bytes,
            profile=cluster_file.fingerprint,
        )

    def add(
        self, table: int, layers_per_stage: Cuts, strategies: Columns, schedule: Schedule | None = None
    ) -> Finalist:
        """The simulated candidate of a choice of a table, under its own schedule or another."""
        key = table, layers_per_stage, strategies, schedule or self.made.cuts[table].schedule
        if key not in self.found:
            plan = self.priced(self.plan(*key))
            fits = peak_bytes(plan) <= self.budget_bytes and self._few_enough(key[2])
            self.found[key] = Finalist(plan=plan, fits=fits)
        return self.found[key]

    def priced(self, plan: Plan) -> Plan:
        """The plan with its prediction."""
        model, cluster = self.model_file, self.cluster_file
        predicted = predict(plan, model.model, model.layers, cluster.cluster, cluster.links, self._known)
        return replace(plan, predicted=predicted)

    def fits(self, table: int, layers_per_stage: Cuts, strategies: Columns, schedule: Schedule | None = None) -> bool:
        """Whether the memory walk of every stage stays within the budget, under the table's schedule or another."""
        if not self._few_enough(strategies):
            return False
        if not score(self.made.lower[table], layers_per_stage, strategies).fits:
            return False
        ends = (0, *accumulate(layers_per_stage))
        # What precedes a stage does not matter to it: activations arrive in the boundary layout.
        under = schedule or self.made.cuts[table].schedule
        keys = [(table, stage, a, strategies[a:b], under) for stage, (a, b) in enumerate(pairwise(ends))]
        if not self._over.isdisjoint(keys):
            return False
        plan = self.plan(table, layers_per_stage, strategies, schedule)
        for key in keys:
            try:
                fits = self._walk(plan, key[1], self.budget_bytes).peak_bytes <= self.budget_bytes
            except OverBudgetError:
                fits = False
            if not fits:
                self._over.add(key)
                return False
        return True

    def peak_bytes(self, table: int, layers_per_stage: Cuts, strategies: Columns) -> int:
        """The peak of the worst stage by the memory walk."""
        plan = self.plan(table, layers_per_stage, strategies)
        return max(self._walk(plan, stage).peak_bytes for stage in range(plan.pp))

    def refutations(self, plan: Plan) -> tuple[Refutation, ...]:
        """The stages of a plan that are over the budget."""
        found = []
        for stage in range(plan.pp):
            working: list[int | None] = []
            model, layers = self.model_file.model, self.model_file.layers
            peak_bytes = rank_memory(plan, stage, model, layers, self._known, working=working).peak_bytes
            if peak_bytes > self.budget_bytes:
                layer = None if working[0] is None else plan.stage_layers(stage).start + working[0]
                found.append(Refutation(stage=stage, over_bytes=peak_bytes - self.budget_bytes, layer=layer))
        return tuple(found)

    def _walk(self, plan: Plan, stage: int, most_bytes: int | None = None) -> RankMemory:
        model, layers = self.model_file.model, self.model_file.layers
        return rank_memory(plan, stage, model, layers, self._known, most_bytes=most_bytes)

    def _few_enough(self, strategies: Columns) -> bool:
        """Whether the blocks take no more strategies than were asked for."""
        most = self.request.max_strategies
        return most is None or len(set(strategies[1:-1])) <= most

    def best_ns(self, table: int | None = None) -> int:
        """The least objective of the candidates that fit, of all or of one table, INFEASIBLE without one."""
        fitting = (f.plan for key, f in self.found.items() if f.fits and table in (None, key[0]))
        return min(map(objective_ns, fitting), default=INFEASIBLE)

    def plan(self, table: int, layers_per_stage: Cuts, strategies: Columns, schedule: Schedule | None = None) -> Plan:
        """The plan of a choice, without a prediction, with a certificate that has no bound yet."""
        cut, tables = self.made.cuts[table], self.made.lower[table]
        return Plan(
            model=self._model,
            cluster=self._cluster,
            request=self.request,
            pp=cut.pp,
            schedule=schedule or cut.schedule,
            num_micro_batches=cut.num_micro_batches,
            layers_per_stage=layers_per_stage,
            strategies=tuple(tables.strategies[s] for s in strategies),
            certificate=Certificate(
                objective_ns=score(tables, layers_per_stage, strategies).objective_ns,
                lower_bound_ns=0,
                status="gap",
                solver=SOLVER,
            ),
            versions={"autopar": autopar.__version__},
        )
