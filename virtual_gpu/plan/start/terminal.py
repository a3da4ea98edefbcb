"""`virtual-gpu fit --from FILE`: a configuration in, the lines to change out."""

from __future__ import annotations

import argparse
import json

from ...errors import WrongValue
from ...language import tr
from ...step.setting import Setting
from ...terminal import FITS, NOTHING_FITS, number, say, tell
from ...units import human_bytes
from .answer import check_copy, start_from

# Options of the search that mean nothing here, most because the file says it itself, and their defaults there.
SAID = {
    "batch": "16",
    "precision": None,
    "optimizer": None,
    "optim_args": None,
    "optim_target_modules": None,
    "lora_rank": "8",
    "lora_targets": "attention",
    "modules_to_save": "",
    "host": None,
    "files": None,
}


def execute(args: argparse.Namespace) -> int:
    """Read the file, measure, print (or JSON), write the changed copy, and return the exit status."""
    given = [f"--{name.replace('_', '-')}" for name, default in SAID.items() if getattr(args, name) != default]
    if given:
        raise WrongValue(
            tr(
                ko=f"{', '.join(given)}: --from의 파일이 말하는 것이다.",
                en=f"{', '.join(given)}: --from's file says it.",
            )
        )
    if args.save:
        check_copy(args.save, args.force)  # before the work, not after it
    methods = [method for method in args.methods.split(",") if method]
    tell(tr(ko="재는 중이다. Ctrl+C를 누르면 멈춘다.", en="Measuring; Ctrl+C stops."))
    found = start_from(
        args.start,
        args.gpu,
        number(args.gpus),
        model=args.model,
        length=None if args.length is None else number(args.length),
        peft=methods[0] if len(methods) == 1 and methods[0] != "full" else None,
        objective=args.objective,
        margin=number(args.margin),
        progress=_tell,
    )
    if args.json:
        say(json.dumps(found.to_dict(), ensure_ascii=False, indent=2))
    else:
        say(str(found))
    if args.save and found.lines:
        path = found.save(args.save, args.force)
        if not args.json:
            say(tr(ko=f"바꾼 파일을 {path}에 저장했다.", en=f"The changed file was written to {path}."))
    return FITS if found.fits else NOTHING_FITS


def _tell(setting: Setting, needed: int) -> None:
    tell(f"{setting.title}: {human_bytes(needed)}")
