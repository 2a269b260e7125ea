"""The classes of the modules whose forward ran: which attention, layers and experts a model really uses."""

from types import TracebackType
from typing import Any


class ModuleCensus:
    """Notes the class of every module that runs inside of the block; nothing is left in the modules."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self.num_begun = 0  # forwards
        self._handle: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The classes by name, in order."""
        return tuple(sorted(self._names))

    def __enter__(self) -> "ModuleCensus":
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()

    def _note(self, module: Any, _inputs: Any) -> None:
        self._names.add(type(module).__name__)
        self.num_begun += 1
