"""MoE-Lightning's policy search (§4.2, §B.2) finds the policy that fits and has the most sequences per second of a
layer.

The paper minimises the per-layer latency T. This alone leads to a tiny batch, so here the largest N / T is sought. With
mu, A_g and F_g fixed, T and all memory are linear in N, the number of micro-batches, r_w and r_c N (`linear_terms`). So
each choice of mu, A_g and F_g is a mixed-integer program. Dinkelbach's method maximises its quotient: the largest N -
rate T is 0 exactly where the rate is the best one. Micro-batch sizes are searched by branch and bound: a range of them
is relaxed to its smallest size for memory and time, its largest for the number of micro-batches, and fractions where
whole numbers are asked for. A wide range is divided by sizes; a narrow one at such a fraction first, of an expert, a
micro-batch or a sequence, which rules out sizes as well. What is left has whole numbers without being asked for them,
which takes a tenth of the time. The powers of two are looked at beforehand, and sizes near the best of them: they give
a rate that most ranges cannot beat. Where there are many ranges nevertheless, a rough search finds a better rate.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.config import ConfigError
from harness.memory.tiers import enough, told_bytes
from strategies.offloading.planning.memory import KV_CACHE, held_bytes, shortfalls
from strategies.offloading.planning.policy import GivenPolicy, Policy
from strategies.offloading.planning.program import MARGIN, Program
from strategies.offloading.planning.task import Search

_WORTH_A_THOUGHT = 1e-6  # the search is exact to this share of the rate
_ROUGH = 1e-4  # and to this share where it is rough
_MANY_PROGRAMS = 100  # of a search of ranges, before a rough one is tried
_SAME_RATE = 1e-3  # policies this close in rate count as equal; the one with the fewest sequences is taken


def search(task: Search) -> Policy:
    """Return the policy of `better_policy` where none is known yet.

    Raises ConfigError naming what is too small where no policy fits.
    """
    found = better_policy(task, 0.0)
    if found is None:
        raise nothing_fits(task)
    return found


def faster_of(first: Search, second: Search) -> tuple[Search, Policy] | None:
    """Return the task that has the better policy, and that policy; the first task where it is a tie.

    Where a short look at the second one finds a rate that the first cannot come near, the first is not searched: to
    rule it out takes a tenth of the time. Returns None where no policy fits.
    """
    looks = _looked_at(first, 0.0), _looked_at(second, 0.0)
    enough, best, rate = looks[1].sought.rate * (1 - 2 * _SAME_RATE), None, 0.0
    is_beaten = looks[0].sought.rate < enough and _explored(first, _ranges(first), _known(enough)).program is None
    for task, look in [(second, looks[1])] if is_beaten else zip((first, second), looks, strict=True):
        policy = better_policy(task, rate, look)
        if policy is not None and task.rate(policy) > rate:
            best, rate = (task, policy), task.rate(policy)
    return best


def better_policy(task: Search, known_rate: float, look: _Look | None = None) -> Policy | None:
    """Return the best policy, or one within 0.1 % of it that has a smaller batch; None if all that fit are known.

    The latter differs in N, r_w and r_c only, takes no more batches for the workload where the task keeps their number,
    and has the smallest batch of all such policies. Known are those that do not beat `known_rate` by more than is worth
    a thought. `look` is what a short look at the task has found, if there was one.
    """
    best = _best_program(task, known_rate, look or _looked_at(task, known_rate))
    if best is None:
        return None
    fastest, rate = best.fastest(known_rate)
    if rate <= known_rate:
        return None
    num_requests = max(task.deployment.shape.num_requests, 1)
    num_batches = -(-num_requests // fastest.batch_size)
    fewest = min(-(-num_requests // num_batches), fastest.batch_size) if task.keeps_num_batches else 1
    policy = best.smallest_at(rate * (1 - _SAME_RATE), fewest=fewest)
    assert policy is not None and task.allows(policy), f"the search left its constraints: {policy}"
    return policy


def _best_program(task: Search, known_rate: float, look: _Look) -> Program | None:
    """Search ranges of micro-batch sizes depth first, larger sizes first, and return the best program.

    A range is dropped where its relaxation does not beat the best rate so far by more than is worth a thought.
    """
    found, sought = (look.found, look.sought) if look.sought.rate > known_rate else (_known(known_rate),) * 2
    if sought.rate > found.rate:
        # Of the programs that reach what was sought, the one that stands first is the best. There is one, unless the
        # solver contradicts itself.
        least = max(found.rate, sought.rate * (1 - 2 * _WORTH_A_THOUGHT))
        better = _explored_ranges(task, replace(found, rate=least))
        if better.program is not found.program:
            return better.program
    return _explored_ranges(task, found).program


def _explored_ranges(task: Search, known: _Found) -> _Found:
    """Search all ranges for the program that stands first of the best ones, if one beats what is known.

    If they are many, each found one may be a little better than the last. A rough search leaves most of these out.
    """
    todo = _ranges(task)
    found = _explored(task, todo, known, most_programs=_MANY_PROGRAMS)
    if not todo:
        return found
    rough = _explored(task, _ranges(task), found, worth=_ROUGH)
    least = max(found.rate, rough.rate * (1 - 2 * _WORTH_A_THOUGHT))
    better = _explored(task, todo, replace(found, rate=least))
    return better if better.program is not found.program else rough


def _ranges(task: Search) -> list[Program]:
    """Return a program of all sizes that a micro-batch may have for each choice of the switches."""
    most, fewest = task.most_sequences, task.fewest_micro_batches
    largest = most if fewest == 1 else (most - 1) // (fewest - 1)
    given = task.given.micro_batch_size
    sizes = (1, largest) if given is None else (given, given)
    return [Program(task, on_gpu, ffn, *sizes) for on_gpu, ffn in task.switches()]


def _looked_at(task: Search, known_rate: float) -> _Look:
    """Look at powers of two, and at sizes near the best of them; at none where the size is given."""
    found = _known(known_rate)
    if task.given.micro_batch_size is not None:
        return _Look(found, found)
    powers = [
        replace(each, smallest=1 << n, largest=1 << n)
        for each in _ranges(task)
        for n in range(each.largest.bit_length())
    ]
    found = _explored(task, powers, found)
    return _Look(found, _climbed(task, found))


@dataclass(frozen=True)
class _Found:
    """A search has found this program as the best one, with its rate and its policy, or knows a rate from elsewhere."""

    program: Program | None
    rate: float
    policy: Policy | None


def _known(rate: float) -> _Found:
    return _Found(None, rate, None)


@dataclass(frozen=True)
class _Look:
    """A short look at a task has found the best of the powers of two, and a rate in sizes near it."""

    found: _Found
    sought: _Found


def _explored(
    task: Search,
    todo: list[Program],
    found: _Found,
    *,
    worth: float = _WORTH_A_THOUGHT,
    most_programs: int | None = None,
) -> _Found:
    """Search these programs, the last one first, for one that beats what was found by more than is `worth` a thought.

    What exceeds `most_programs` is left in `todo`.
    """
    count = 0
    while todo and count != most_programs:
        program = todo.pop().narrowed()
        relaxed = program.relaxed(found.rate * (1 + worth)) if program is not None else None
        count += 1
        if program is None or relaxed is None:
            continue
        if parts := program.parts(relaxed):
            todo.extend(parts)
            continue
        policy = program.policy_of(relaxed)
        reached = task.rate(policy)  # no number that is to be whole has a fraction
        if reached > found.rate * (1 + 1e-9):
            found = _Found(replace(program, limits=()), reached, policy)
            todo.append(program)  # Dinkelbach
    return found


def _climbed(task: Search, found: _Found) -> _Found:
    """Look for a better rate in the sizes that divide the best batch into fewer or more micro-batches.

    Steps are halved where they do not help. Between two such sizes a larger one only wastes room in the last
    micro-batch, which the search of ranges would learn size by size.
    """
    if found.program is None or found.policy is None:
        return found
    batch, program = found.policy.batch_size, found.program
    count = -(-batch // program.smallest)
    step = count
    while step:
        for other in (count - step, count + step):
            size = -(-batch // other) if other > 0 else 0
            if size and task.fewest_micro_batches <= other <= (task.max_micro_batches or other):
                better = _explored(task, [replace(program, smallest=size, largest=size)], found)
                if better.rate > found.rate:
                    found, count = better, other
                    break
        else:
            step //= 2
    return found


def nothing_fits(task: Search) -> ConfigError:
    """Name in an error the tier that is too small even for the smallest policy."""
    given = task.given
    batch = given.batch_size or (given.micro_batch_size or 1) * (task.fewest_micro_batches - 1) + 1
    micro_batch = given.micro_batch_size or -(-batch // (task.max_micro_batches or batch))
    on_gpu, ffn = next(task.switches(), (True, True))
    policy = Policy(
        batch_size=max(batch, micro_batch),
        micro_batch_size=micro_batch,
        gpu_attention=on_gpu,
        gpu_ffn=ffn,
        resident_weights=given.resident_weights or 0.0,
        resident_kv=given.resident_kv or 0.0,
    )
    missing = shortfalls(task.deployment, policy)
    if not missing:
        return ConfigError("strategy.policy", f"what is given leaves no policy that the pipeline can run: {given}")
    tier = max(missing, key=lambda name: missing[name])
    held = held_bytes(task.deployment, policy)[tier]
    whole = "in whole blocks " if tier == KV_CACHE else ""
    needed_gb = enough(sum(held.values()) * (1 + MARGIN) + 1)
    limit_gb = task.deployment.limits_bytes[tier] / 1e9
    field = {KV_CACHE: "kv_cache_gb", "ram": "hardware.ram_gb"}.get(tier, f"hardware.{tier}_memory_gb")
    what = f"this policy needs {needed_gb} GB" if given != GivenPolicy() else f"any policy needs {needed_gb} GB"
    return ConfigError(field, f"{whole}{limit_gb:g} GB is too small: {what} ({told_bytes(held)})")
