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
    patch_language_once(interpreter)
    keep_types(interpreter)
    call_builtins_directly(interpreter)
    search_types_once(interpreter)


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


def patch_language_once(interpreter) -> None:
    """Let the interpreter patch ``triton.language`` once per module, not at every launch and call of a function."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()

    def call(function, *args, **kwargs):
        patch_once(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call


def keep_types(interpreter) -> None:
    """Let the interpreter make a type's dtype of numpy, shape and name once."""
    import triton.language as tl

    dtype_of, of_block, of_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    dtypes, blocks, shapes = {}, {}, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    def init_block(block, element_type, shape):
        key = element_type.name, *[getattr(size, "value", size) for size in shape]
        if key not in blocks:
            of_block(block, element_type, shape)
            blocks[key] = vars(block).copy()
        vars(block).update(blocks[key])

    def init_tensor(tensor, handle, type):
        key = type.name
        if key not in shapes:
            of_tensor(tensor, handle, type)
            shapes[key] = {name: value for name, value in vars(tensor).items() if name != "handle"}
        vars(tensor).update(shapes[key], handle=handle)

    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


def call_builtins_directly(interpreter) -> None:
    """Let a function of ``triton.language`` be one call, not three."""

    def patch(module, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(module, name, call)

    interpreter._patch_attr = patch


def search_types_once(interpreter) -> None:
    """Let operands of one type skip the search for a common one, and keep numbers in the form of the other operand.

    Integers are no longer computed again in 64 bits: only with ``debug`` would the interpreter say that they overflow.
    """
    import triton.language as tl

    semantic = interpreter.interpreter_semantic
    check, constant = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    same, numbers, constants = {"fp32", "int1", "int32", "int64"}, {}, {}

    def checked(left, right, *args, **kwargs):
        if isinstance(left, tl.tensor) and isinstance(right, tl.tensor):
            if left.dtype.name == right.dtype.name in same:
                one_type = left.type.name == right.type.name
                return (left, right) if one_type else semantic.broadcast_impl_value(left, right)
        elif isinstance(left, tl.tensor) and isinstance(right, (int, float)):
            key = left.type.name, repr(right), args, *kwargs.items()
            if key in numbers:
                return left, numbers[key]
            of_left, of_right = check(left, right, *args, **kwargs)
            if of_left is left:
                numbers[key] = of_right
            return of_left, of_right
        return check(left, right, *args, **kwargs)

    def scalar_constant(value, dtype):
        key = repr(value), dtype.name
        if key not in constants:
            constants[key] = constant(value, dtype)
        return constants[key]

    semantic.binary_op_type_checking_impl, semantic.scalar_constant = checked, scalar_constant
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
