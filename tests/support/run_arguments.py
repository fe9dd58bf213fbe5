"""Arguments of a run, as far as its folder reads them."""

from argparse import Namespace

import torch


def arguments(**changes):
    """Return them, some of them changed."""
    values = {
        "seed": 1234,
        "data_path": ["text"],
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_args_path": None,
        "per_split_data_args_path": None,
        "split": "98,1,1",
        "mock_data": False,
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": "tokenizer.model",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_experts": 8,
        "seq_length": 16,
        "params_dtype": torch.bfloat16,
        "save": None,
        "save_interval": None,
        "load": None,
        "finetune": False,
        "ckpt_step": None,
        "tensorboard_dir": None,
        "switch_metrics_file": None,
    }
    return Namespace(**{**values, **changes})
