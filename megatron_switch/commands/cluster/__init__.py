"""Commands for clusters: plan, rehearse, render-launch, check-binding, from-deepspeed."""
