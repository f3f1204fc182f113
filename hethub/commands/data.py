"""hethub tokenise and export: text in, weights out."""

import argparse
from pathlib import Path
from typing import Any

from hethub.commands.common import check_writable, command, need_torch


def add(commands: Any) -> None:
    _add_tokenise(commands)
    _add_export(commands)


def _add_tokenise(commands: Any) -> None:
    parser = command(
        commands,
        "tokenise",
        tokenise,
        "Turns text into a token file that jobs read with `source: tokens`.",
        "hethub tokenise corpus/ --tokenizer tokenizer.json --out corpus.bin",
    )
    parser.add_argument("text", type=Path, nargs="+", metavar="TEXT", help="files or folders (.jsonl: the key `text`)")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json, or `bytes`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def tokenise(options: argparse.Namespace) -> None:
    from hethub.runtime.data.tokenise import tokenise as make_tokens

    check_writable(options.out)
    print(make_tokens(options.text, options.tokenizer, options.out))


def _add_export(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        export,
        "Writes the newest checkpoint of a run as a Hugging Face folder.",
        "hethub export runs/laptop-mixed-20260101-120000 --to my-llama",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--to", type=Path, required=True, metavar="HF_DIR")


def export(options: argparse.Namespace) -> None:
    need_torch("export")
    from hethub.runtime.checkpoint.export import export as write_folder

    print(f"exported {write_folder(options.run, options.to)} to {options.to}")
