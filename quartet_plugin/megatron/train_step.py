"""Work before and after Megatron's `train_step`, whose first parameters are the same in every release."""

import functools
from collections.abc import Callable
from typing import Any

Before = Callable[[Any, Any, Any], None]
After = Callable[[Any, Any, Any], None]


def around_train_step(
    train_step: Callable[..., Any], *, before: Before | None = None, after: After | None = None
) -> Callable[..., Any]:
    """`train_step` between `before(model, optimizer, scheduler)` and `after(model, optimizer, results)`.

    Its results and its signature stay.
    """

    @functools.wraps(train_step)
    def wrapped_train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if before is not None:
            before(model, optimizer, opt_param_scheduler)
        results = train_step(
            forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, *args, **kwargs
        )
        if after is not None:
            after(model, optimizer, results)
        return results

    return wrapped_train_step
