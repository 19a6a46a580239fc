"""Which plans to try, and why none fits. `best_plans` shows the flow; below it, every arrow goes down this list.

- `refused/`: where nothing fits, what is short and which changes of the request would do.
- `best_plans`: all kinds of plans, each bounded by the best before it; `replayed`: a plan that the user gives;
  `placement`: where the ranks of a plan go.
- `stages/`: pipelines and branches side by side. From drafts (`cuts`, `branches`) to plans (`plan_of_draft`), with the
  fastest schedule (`schedule_choice`) and as little recomputed as fits (`recompute_levels`).
- `one_mesh/`: plans without stages. The solver's strategies (`by_strategy`); mesh, microbatches, recompute and offload
  together (`short_memory`), by plans within the limit (`within_memory`) from one joint problem (`joint`).
- `lower_bounds`: what no plan can do without; `microbatches`: which counts, and the task for each; `task`: what is
  planned; `clock`: when a search ends early.
"""
