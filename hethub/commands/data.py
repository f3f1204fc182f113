"""hethub tokenise, export and generate: text in, weights and text out."""

import argparse
import signal
import sys
from typing import Any

from hethub.commands.common import check_writable, command, count, need_torch, path
from hethub.spec.errors import BadInput

_RUN = "the folder that train printed, or one of its checkpoints, RUN_DIR/checkpoints/step-N"


def add(commands: Any) -> None:
    _add_tokenise(commands)
    _add_export(commands)
    _add_generate(commands)


def _add_tokenise(commands: Any) -> None:
    parser = command(
        commands,
        "tokenise",
        tokenise,
        "Turns text into a token file that jobs read with `source: tokens`.",
        "hethub tokenise corpus/ --tokenizer tokenizer.json --out corpus.bin",
    )
    parser.add_argument("text", type=path, nargs="+", metavar="TEXT", help="files or folders of text and .jsonl")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json, or `bytes`")
    parser.add_argument("--out", type=path, required=True, metavar="FILE", help="the token file to write")
    text = "of a .jsonl line, where its text stands, as `text:` of a job has it (default: text)"
    parser.add_argument("--key", default="text", metavar="KEY", help=text)


def tokenise(options: argparse.Namespace) -> None:
    from hethub.runtime.data.tokenise import tokenise as make_tokens

    check_writable(options.out)
    _take_half_written_along()
    print(make_tokens(options.text, options.tokenizer, options.out, key=options.key))


def _add_export(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        export,
        "Writes the newest checkpoint of a run as a Hugging Face folder.",
        "hethub export runs/laptop-mixed-20260101-120000 --to my-llama",
    )
    parser.add_argument("run", type=path, metavar="RUN_DIR", help=_RUN)
    parser.add_argument("--to", type=path, required=True, metavar="HF_DIR", help="a folder that is not there yet")


def export(options: argparse.Namespace) -> None:
    need_torch("export")
    from hethub.runtime.checkpoint.export import export as write_folder

    _take_half_written_along()
    print(f"exported {write_folder(options.run, options.to)} to {options.to}")


def _take_half_written_along() -> None:
    """From here on SIGTERM ends this command as an error does, so that what is half written goes with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _add_generate(commands: Any) -> None:
    parser = command(
        commands,
        "generate",
        generate,
        "Goes on with a prompt from the newest checkpoint of a run.",
        'hethub generate runs/laptop-mixed-20260101-120000 "def main(" --tokens 40',
    )
    parser.add_argument("run", type=path, metavar="RUN_DIR", help=_RUN)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with")
    parser.add_argument("--tokens", type=count, default=64, metavar="N", help="at most so many (default: 64)")
    text = "0: always the likeliest token (default); above, drawn, the more evenly the higher"
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help=text)
    parser.add_argument("--seed", type=seed, metavar="S", help="of what is drawn, with --temperature (default: 0)")


def generate(options: argparse.Namespace) -> None:
    if options.seed is not None and options.temperature == 0:
        raise BadInput(
            "--seed is of what is drawn, and nothing is at temperature 0; give a --temperature above 0, too."
        )
    need_torch("generate")
    from hethub.runtime.checkpoint.generate import generate as go_on

    pieces = go_on(
        options.run, options.prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed or 0
    )
    print(options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2**64")
    return number


def temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return number
