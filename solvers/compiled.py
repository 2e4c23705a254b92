"""The inner loops of the exact solver, compiled with numba: the same numbers as the numpy forms, bit for bit.

Imported only when the engine "numba" was asked for and numba is installed. `shortest` is `dual._Walk.go`, `behind` is
`labels._Search._backward`, `set_labels` is `labels._Search.run`: they say what is computed, this says it in loops.
No fastmath: a fused multiplication would round differently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from autopar.price import Int
from autopar.solvers.segment import FORBIDDEN, Float

OVERFLOW, NONE, FOUND = 0, 1, 2
"""What `set_labels` says: more candidates of one layer than `most`, no choice below the limit, or one."""


@njit(cache=True)
def shortest(
    weight: Float, time_ns: Float, memory_bytes: Float, steps: Float, paid: Float, order: Int, step_order: Int
) -> tuple[Float, Float, Float, Int, Int]:
    """Value, time and memory [J], group and place [L, J] of the paths of least weight.

    weight[J, K, C, N]; time_ns and memory_bytes[K, C, N]; steps[Q, C, C]: what counts for the weight; paid: for time.
    """
    thresholds, kinds, groups, width = weight.shape
    layers = len(order)
    value, time, memory = np.empty(thresholds), np.zeros(thresholds), np.zeros(thresholds)
    group, place = np.empty((layers, thresholds), dtype=np.int64), np.empty((layers, thresholds), dtype=np.int64)
    least, first = np.empty((kinds, groups)), np.empty((kinds, groups), dtype=np.int64)
    back = np.zeros((layers, groups), dtype=np.int64)
    now, after = np.empty(groups), np.empty(groups)
    for j in range(thresholds):
        for k in range(kinds):
            for c in range(groups):
                best, at = weight[j, k, c, 0], 0
                for n in range(1, width):
                    if weight[j, k, c, n] < best:
                        best, at = weight[j, k, c, n], n
                least[k, c], first[k, c] = best, at
        now[:] = least[order[0]]
        for layer in range(1, layers):
            step = steps[step_order[layer]]
            for d in range(groups):
                best, at = now[0] + step[0, d], 0
                for c in range(1, groups):
                    if now[c] + step[c, d] < best:
                        best, at = now[c] + step[c, d], c
                after[d] = best + least[order[layer], d]
                back[layer, d] = at
            now[:] = after
        last = int(np.argmin(now))
        value[j] = now[last]
        for layer in range(layers - 1, -1, -1):
            kind = order[layer]
            group[layer, j], place[layer, j] = last, first[kind, last]
            time[j] += time_ns[kind, last, first[kind, last]]
            memory[j] += memory_bytes[kind, last, first[kind, last]]
            if layer:
                time[j] += paid[step_order[layer], back[layer, last], last]
                last = back[layer, last]
    return value, time, memory, group, place


@njit(cache=True)
def behind(weight: Float, least: Int, steps: Int, order: Int, step_order: Int) -> tuple[Float, Int]:
    """[L, R, C] time + price * memory and [L, C] memory that the layers after each one need at least, by group."""
    prices, _, groups = weight.shape
    layers = len(order)
    ahead, memory = np.zeros((layers, prices, groups)), np.zeros((layers, groups), dtype=np.int64)
    for layer in range(layers - 1, 0, -1):
        kind, step = order[layer], steps[step_order[layer]]
        for c in range(groups):
            for row in range(prices):
                best = np.inf
                for d in range(groups):
                    if step[c, d] < FORBIDDEN:
                        best = min(best, step[c, d] + (weight[row, kind, d] + ahead[layer, row, d]))
                ahead[layer - 1, row, c] = best
            need = FORBIDDEN
            for d in range(groups):
                if step[c, d] < FORBIDDEN:
                    need = min(need, least[kind, d] + memory[layer, d])
            memory[layer - 1, c] = need
    return ahead, memory


@njit(cache=True)
def _regrets(step: Int, used: Any) -> Int:
    """[C, C]: the most that the first group can cost more than the second on the way to any group in use."""
    groups = len(step)
    regret = np.empty((groups, groups), dtype=np.int64)
    for a in range(groups):
        for b in range(groups):
            most = -FORBIDDEN
            for d in range(groups):
                if used[d]:
                    most = max(most, step[a, d] - step[b, d])
            regret[a, b] = most
    return regret


@njit(cache=True)
def _sorted(memory: Int, time: Int) -> Int:
    """The order by memory, then time, then place."""
    order = np.argsort(memory, kind="mergesort")
    count = len(order)
    first = 0
    while first < count:
        end = first + 1
        while end < count and memory[order[end]] == memory[order[first]]:
            end += 1
        if end - first > 1:
            run = order[first:end].copy()
            order[first:end] = run[np.argsort(time[run], kind="mergesort")]
        first = end
    return order


@njit(cache=True)
def set_labels(
    order: Int,
    step_order: Int,
    steps: Int,
    start: Int,
    option_time: Int,
    option_memory: Int,
    option_group: Int,
    ahead: Float,
    memory_ahead: Int,
    prices: Float,
    limits: Float,
    spare: int,
    most: int,
) -> tuple[int, int, int, Int]:
    """What came out (OVERFLOW, NONE or FOUND), least time, labels kept, and the option chosen at each layer.

    Options of kind k are start[k] .. start[k + 1] - 1 of the three flat arrays; the rest as in `labels._Search`.
    """
    layers, groups = len(order), steps.shape[1]
    used = np.zeros((len(start) - 1, groups), dtype=np.bool_)
    for k in range(len(start) - 1):
        for s in range(start[k], start[k + 1]):
            used[k, option_group[s]] = True
    none = np.zeros(0, dtype=np.int64)
    memory, time, group = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    parents, chosen = np.empty(1024, dtype=np.int64), np.empty(1024, dtype=np.int64)
    offset = np.zeros(layers + 1, dtype=np.int64)
    regret, known = np.zeros((groups, groups), dtype=np.int64), (-1, -1)
    earliest = np.empty(groups, dtype=np.int64)
    for layer in range(layers):
        kind, step = order[layer], steps[step_order[layer]]
        count, options = len(memory), start[kind + 1] - start[kind]
        if count * options > most:
            return OVERFLOW, 0, int(offset[layer]), none
        next_memory = np.empty(count * options, dtype=np.int64)
        next_time, next_parent = np.empty_like(next_memory), np.empty_like(next_memory)
        next_option = np.empty_like(next_memory)
        size = 0
        for parent in range(count):
            for s in range(start[kind], start[kind + 1]):
                g = option_group[s]
                m, t = memory[parent] + option_memory[s], time[parent] + option_time[s]
                if layer:
                    t += step[group[parent], g]
                if m + memory_ahead[layer, g] > spare:
                    continue
                ok = True
                for row in range(len(prices)):
                    if t + prices[row] * m + ahead[layer, row, g] > limits[row]:
                        ok = False
                        break
                if ok:
                    next_memory[size], next_time[size], next_parent[size], next_option[size] = m, t, parent, s
                    size += 1
        if size == 0:
            return NONE, 0, int(offset[layer]), none
        if layer + 1 == layers:
            regret = np.zeros((groups, groups), dtype=np.int64)
        elif known != (step_order[layer + 1], order[layer + 1]):
            known = (step_order[layer + 1], order[layer + 1])
            regret = _regrets(steps[known[0]], used[known[1]])
        while len(parents) < offset[layer] + size:
            parents = np.concatenate((parents, np.empty_like(parents)))
            chosen = np.concatenate((chosen, np.empty_like(chosen)))
        earliest[:] = FORBIDDEN
        memory, time, group = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
        kept = 0
        for place in _sorted(next_memory[:size], next_time[:size]):
            t, g = next_time[place], option_group[next_option[place]]
            replaced = False
            for other in range(groups):
                if earliest[other] < FORBIDDEN and earliest[other] + regret[other, g] <= t:
                    replaced = True
                    break
            earliest[g] = min(earliest[g], t)
            if not replaced:
                memory[kept], time[kept], group[kept] = next_memory[place], t, g
                parents[offset[layer] + kept] = next_parent[place]
                chosen[offset[layer] + kept] = next_option[place]
                kept += 1
        memory, time, group = memory[:kept], time[:kept], group[:kept]
        offset[layer + 1] = offset[layer] + kept
    last = int(np.argmin(time))
    least = time[last]
    path = np.empty(layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        path[layer] = chosen[offset[layer] + last]
        last = int(parents[offset[layer] + last])
    return FOUND, int(least), int(offset[layers]), path
