"""Triton's interpreter, mended, made faster, and as exact as a GPU, for this process."""

import functools

import torch


def mend() -> None:
    """Mend four faults of Triton's interpreter, and make it faster."""
    from triton.runtime import interpreter

    index_any_shape(interpreter)
    cast_masks(interpreter)
    round_to_nearest(interpreter)
    pass_over_nan(interpreter)
    patch_language_once_per_launch(interpreter)


def index_any_shape(interpreter) -> None:
    """Let a tensor of one element be an index. Up to Triton 3.6, numpy 2.4 refuses its array of one dimension."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def cast_masks(interpreter) -> None:
    """Let loads and stores take every mask. Triton 3.9 refuses its own masks of ``&`` ("unsupported dtype")."""

    def cast(name, position):
        method = getattr(interpreter.InterpreterBuilder, name)

        @functools.wraps(method)
        def of_bools(builder, *arguments):
            mask = arguments[position]
            as_bool = interpreter.TensorHandle(mask.data.astype(bool, copy=False), mask.dtype)
            return method(builder, *arguments[:position], as_bool, *arguments[position + 1 :])

        setattr(interpreter.InterpreterBuilder, name, of_bools)

    cast("create_masked_load", 1)
    cast("create_masked_store", 2)


def patch_language_once_per_launch(interpreter) -> None:
    """Let the interpreter patch ``triton.language`` once per launch and module, not at every call of a function.

    That halves the time of an interpreted kernel.
    """
    launch, patched = interpreter.GridExecutor.__call__, set()

    def patched_launch(executor, *args, **kwargs):
        patched.clear()
        return launch(executor, *args, **kwargs)

    def call(function, *args, **kwargs):
        module = function.fn.__module__
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = patched_launch
    interpreter.InterpretedFunction.__call__ = call


def round_to_nearest(interpreter) -> None:
    """Let the interpreter round fp32 to the nearest bf16, as GPUs do; it truncates. That is also faster."""
    import numpy as np
    import triton.language as tl

    convert = interpreter._convert_float

    def converted(values, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return values.astype(np.uint32) << 16
        return convert(values, source, target, rounding_mode)

    interpreter._convert_float = converted


def pass_over_nan(interpreter) -> None:
    """Let ``tl.maximum`` of a number and a NaN be the number, and ``tl.minimum``, as on GPUs; ``tl.max`` is so."""
    import numpy as np

    for name, operation in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(interpreter.InterpreterBuilder, name, functools.partialmethod(_binary, operation))


def _binary(builder, operation, left, right):
    return builder.binary_op(left, right, operation)
