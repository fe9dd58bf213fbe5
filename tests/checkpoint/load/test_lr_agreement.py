"""A changed schedule is told by flag and value, before Megatron's assertion."""

from argparse import Namespace

import pytest

from megatron_switch.checkpoint.load.lr_agreement import check_schedule, keep_schedule
from megatron_switch.errors import CheckpointError

ARGS = {
    "train_iters": 10,
    "train_samples": None,
    "global_batch_size": 8,
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_warmup_fraction": None,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": None,
    "lr_wsd_decay_samples": None,
    "lr_warmup_init": 0.0,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.01,
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
}


def arguments(**changes) -> Namespace:
    return Namespace(**{**ARGS, **changes})


def record(args: Namespace) -> dict:
    """What Megatron's own scheduler would store, from Megatron's own function."""
    from megatron.training import training

    optimizer = Namespace(param_groups=[])
    original = training.get_args
    training.get_args = lambda: Namespace(**vars(args))
    try:
        return training.get_optimizer_param_scheduler(optimizer).state_dict()
    finally:
        training.get_args = original


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr_decay_iters": 7},
        {"lr_warmup_iters": 2},
        {"lr_warmup_fraction": 0.3},
        {"train_iters": None, "train_samples": 80, "lr_warmup_samples": 3},
        {"train_iters": None, "train_samples": 80, "lr_decay_samples": 64},
        {"lr_decay_style": "cosine", "min_lr": 1e-5},
        {"weight_decay_incr_style": "cosine", "end_weight_decay": 0.1},
    ],
)
def test_our_numbers_are_megatrons(changes):
    unused = {"rampup_batch_size": None, "step_batch_size_schedule": None}
    args = arguments(**unused, **changes)
    check_schedule(record(args), args, args)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lr": 2e-3}, "--lr: 0.001 in the checkpoint, 0.002 now"),
        ({"min_lr": 1e-5}, "--min-lr: 0.0 in the checkpoint, 1e-05 now"),
        ({"train_iters": 20}, "--train-iters: 10 in the checkpoint, 20 now"),
        ({"lr_decay_iters": 5}, "--lr-decay-iters: 10 in the checkpoint, 5 now"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style: linear in the checkpoint, cosine now"),
        ({"lr_warmup_iters": 2}, "--lr-warmup-iters: 0 in the checkpoint, 2 now"),
        ({"lr_warmup_fraction": 0.5}, "--lr-warmup-fraction: 0 in the checkpoint, 5 now"),
        ({"end_weight_decay": 0.1}, "--end-weight-decay: 0.01 in the checkpoint, 0.1 now"),
        ({"global_batch_size": 16}, "--global-batch-size: 8 in the checkpoint, 16 now"),
        ({"global_batch_size": 16}, "--train-iters: 80 samples in the checkpoint, 160 samples now"),
    ],
)
def test_a_changed_schedule_names_flag_and_values(changes, line):
    with pytest.raises(CheckpointError, match="schedule differs") as error:
        check_schedule(record(arguments()), arguments(), arguments(**changes))
    assert line in str(error.value)
    for way_out in ("--override-opt_param-scheduler", "--exit-interval"):
        assert way_out in str(error.value)


def test_a_longer_run_is_one_line_though_two_numbers_follow_from_it():
    with pytest.raises(CheckpointError) as error:
        check_schedule(record(arguments()), arguments(), arguments(train_iters=20))
    assert str(error.value).count(" in the checkpoint, ") == 1


@pytest.mark.parametrize(
    "way", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
)
def test_the_user_decides_which_schedule_holds(way):
    check_schedule(record(arguments()), arguments(), arguments(lr=1.0, **{way: True}))


def test_the_rate_of_decoupled_parameters_is_compared_too():
    stored = arguments(decoupled_lr=1e-4)
    with pytest.raises(
        CheckpointError, match=r"--decoupled-lr: 0\.0001 in the checkpoint, None now"
    ):
        check_schedule(record(arguments()), stored, arguments())


def test_the_checkpoints_rates_are_taken_where_its_schedule_is_kept():
    stored = arguments(lr=2e-3, min_lr=1e-5, decoupled_lr=1e-4)
    args = arguments(use_checkpoint_opt_param_scheduler=True)
    keep_schedule(record(stored), stored, args)
    assert (args.lr, args.min_lr, args.decoupled_lr) == (2e-3, 1e-5, 1e-4)
    own = arguments()
    keep_schedule(record(stored), stored, own)
    assert own.lr == 1e-3


def test_a_checkpoint_without_a_schedule_fits_every_run():
    check_schedule(None, arguments(), arguments(lr=1.0))


def test_the_same_samples_in_other_batches_are_the_same_schedule():
    check_schedule(record(arguments()), arguments(), arguments(train_iters=5, global_batch_size=16))
