"""Run single experts where it is cheapest: the room of systems for small batches that place experts after each router.

* `placement`: what a strategy is asked after each router, and its answer.
* `residency`: experts in device memory: a hot-expert table, slots for experts on demand, slots for prefetches.
* `pipeline`: a pass through the model, in which each layer's active experts run where the strategy puts them: those
  that have arrived on the device in one op, then each of the others as it comes.
* `deployment`: how device memory is divided, and the steps from an engine to a pipeline on it.
* `popularity`: which experts are hot, by a profile run over other prompts or by a file.
* `costs`: what moving and computing an expert takes, measured on the machine.
* `policies`: placements that several systems begin with.

A system of this room has a `Config` that extends `deployment.PlacementConfig`, and a placer, which decides. Its `build`
makes a `Deployment`, then the placer from `measured` costs, and calls `strategy` with both. The KV cache and all that
is not a routed expert lie in device memory. Several micro-batches can go through a layer together: a scheduler says so
with `PassPlan.micro_batches`, and a placer sees the tokens of all of them. An expert then comes once for all.
"""
