"""Lets clients give the served model the weights of another checkpoint, if the server was started with a folder of
them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from jllm.config import LlamaConfig
from jllm.engine.engine import RUNNING
from jllm.errors import CheckpointError, ConfigError, NoRoomError, QuantizationError, WeightsError
from jllm.files.messages import shown
from jllm.parallel.memory import out_of_memory
from jllm.serve.errors import HttpError, bad

type Read = Callable[[Path], tuple[LlamaConfig, Any]]
FIELDS = ("model", "running")


class Updates:
    """Answers POST /v1/update.

    `root` is the folder that has the checkpoints' directories. `read` returns the config of one, and weights for
    `update`, which is Engine.update. `config` is the served model's.
    """

    def __init__(self, root: Path, config: LlamaConfig, read: Read, update: Callable[..., int]):
        self._root, self._config, self._read, self._update = root.resolve(), config, read, update
        self._busy = threading.Lock()

    def __call__(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the weights of the directory that the body names. Returns their version.

        Memory holds them whole beside the weights that serve. HttpError 503 where there is no room.
        """
        for name in body:
            if name not in FIELDS:
                raise bad(name, f"is not known; known are {', '.join(FIELDS)}")
        folder, running = self._folder(body.get("model")), body.get("running", "recompute")
        if running not in RUNNING:
            raise bad("running", f"must be one of {', '.join(RUNNING)}")
        if not self._busy.acquire(blocking=False):
            raise HttpError(409, "another update is under way: try again later")
        try:
            config, weights = self._read(folder)
            # Its weights are read in the served dtype.
            if differing := [f.name for f in fields(config) if f.name != "dtype" and self._differs(config, f.name)]:
                raise bad("model", f"its config has another {differing[0]} than the served model's")
            return {"version": self._update(weights, running=running)}
        except (NoRoomError, jax.errors.JaxRuntimeError) as error:
            if not (isinstance(error, NoRoomError) or out_of_memory(error)):
                raise
            raise HttpError(503, "there is no room for a second set of weights", code="unavailable") from None
        except (CheckpointError, ConfigError, QuantizationError, WeightsError) as error:
            raise bad("model", str(error)) from None
        finally:
            self._busy.release()

    def _folder(self, name: Any) -> Path:
        if not isinstance(name, str) or not name:
            raise bad("model", "must be the name of a directory")
        try:
            folder = (self._root / name).resolve()
            if folder.is_relative_to(self._root) and folder.is_dir():
                return folder
        except (OSError, ValueError):  # too long, or letters that no file's name has
            pass
        raise bad("model", f"there is no directory {shown(name)} among the server's updates")

    def _differs(self, config: LlamaConfig, name: str) -> bool:
        return getattr(config, name) != getattr(self._config, name)
