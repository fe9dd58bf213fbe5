"""Stored parameter groups get the run's rates, group by group of the same kind."""

from megatron_switch.checkpoint.load.group_rates import take_rates

OLD, NEW = {"max_lr": 1e-3, "min_lr": 0.0}, {"max_lr": 5e-4, "min_lr": 1e-5}


def group(rates, **kind):
    return {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, **kind, **rates}


def test_each_group_gets_the_rates_of_its_kind_and_keeps_the_rest():
    stored = [group(OLD, wd_mult=0.0, step=7), group(OLD, is_expert_parallel=True, start_wd=0.1)]
    other = group(NEW | {"max_lr": 1.0}, is_expert_parallel=True)
    take_rates(stored, [other, group(NEW, wd_mult=0.0)])
    assert stored == [group(NEW, wd_mult=0.0, step=7), other]


def test_older_names_of_multipliers_are_known():
    stored = [{"pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "is_expert_parallel": False, **OLD}]
    take_rates(stored, [group(NEW, wd_mult=0.0)])
    assert stored[0]["max_lr"] == NEW["max_lr"]


def test_groups_that_differ_in_rates_alone_are_left_to_megatron():
    stored = [group(OLD), group(OLD | {"max_lr": 2e-3})]
    before = [dict(each) for each in stored]
    take_rates(stored, [group(NEW), group(NEW | {"max_lr": 1.0})])
    assert stored == before


def test_a_group_of_another_kind_is_left_to_megatron():
    stored = [group(OLD, lr_mult=2.0)]
    take_rates(stored, [group(NEW)])
    assert stored == [group(OLD, lr_mult=2.0)]
