"""Half an hour of a GPU, used in one go: `scripts/gpu_campaign`; docs/gpu-campaign.md explains it.

`plan` lists the items of each part, `runner` starts each in a process of its own (`child`), `results` keeps what came
of them, and `summary` says it. The other modules are what the items do.
"""
