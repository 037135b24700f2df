"""Compile every Triton kernel for a GPU that need not be there: does it build, and what does it take of the machine?

`python -m executor.checks.kernel_build [capability]` prints one line a kernel. Shapes are those of Llama-3.1-8B, and
heads of 64 and 256 in attention, whose tiles are the hardest to fit into shared memory. A kernel that compiles may
still be wrong or slow on the device; one that does not compile, or asks for more shared memory than there is, is caught
without one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from executor.attention.triton import tile_of
from executor.batches.device_arrays import TILE_ROWS
from executor.errors import ExecutorError
from executor.triton_kernels.runtime import SHARED_BYTES, Processor, interpreted
from policies.edges.command_line import run_command
from policies.edges.settings import shown, whole_number


class Built(NamedTuple):
    """shared_bytes: shared memory of a thread block. ptx_lines: size of the program; 0 means nothing was built."""

    kernel: str
    variant: str
    shared_bytes: int
    ptx_lines: int


class Variant(NamedTuple):
    kernel: Any
    label: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]


def build_all(capability: int = 90, wanted: Callable[[Variant], bool] = lambda variant: True) -> list[Built]:
    """Compile all kernels (or those wanted) as they would be launched.

    Raises ExecutorError where Triton interprets, or where a kernel asks for more shared memory than the device has.
    """
    if interpreted():
        raise ExecutorError("kernels are interpreted here (TRITON_INTERPRET is set), nothing is compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    built = []
    processor = Processor.of_capability(capability)
    for variant in filter(wanted, variants(processor)):
        kernel, label, signature, constants, options = variant
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        ordered = {name: types[name] for name in kernel.arg_names}
        # As a launch would find them: pointers and strides are multiples of 16, where Triton is to look at that.
        aligned = [
            (at,)
            for at, (name, kind) in enumerate(ordered.items())
            if (kind.startswith("*") or name.startswith("stride")) and name not in (kernel.do_not_specialize or ())
        ]
        attributes = {at: [["tt.divisibility", 16]] for at in aligned}
        source = ASTSource(fn=kernel, signature=ordered, constexprs=dict(constants), attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
        if compiled.metadata.shared > processor.shared_bytes:
            found = f"{compiled.metadata.shared} bytes of shared memory"
            raise ExecutorError(f"{kernel.__name__} {label}: found {found}, expected at most {processor.shared_bytes}")
        built.append(Built(kernel.__name__, label, compiled.metadata.shared, compiled.asm["ptx"].count("\n")))
    return built


def variants(processor: Processor) -> Iterator[Variant]:
    """The launches that are compiled."""
    for head_dim in (64, 128, 256):
        for kind in ("bf16", "fp32"):
            yield from _attention_variants(kind, head_dim, processor)
    yield from _packed_variants()
    yield from _fused_variants()
    for kind in ("bf16", "fp32"):
        yield from _expert_variants(kind, processor)


def _attention_variants(kind: str, head_dim: int, processor: Processor) -> Iterator[Variant]:
    """Chunks in the largest and the smallest tile, decodes whole and split with their merge."""
    from executor.triton_kernels.paged_attention import chunk_attention, decode_attention, merge_splits

    strides = dict.fromkeys(
        ("stride_q", "stride_out", "stride_block", "stride_head", "stride_slot", "stride_table"), "i32"
    )
    work = dict.fromkeys(("tile_row_ptr", "tile_count_ptr", "tile_position_ptr", "tile_chunk_ptr"), "*i32")
    tensors = dict.fromkeys(("q_ptr", "out_ptr", "keys_ptr", "values_ptr"), f"*{kind}")
    common = {**tensors, "tables_ptr": "*i32", "log2_scale": "fp32", **strides}
    constants = {
        "SHARE": 4,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "D": head_dim,
        "WINDOW": 0,
        "WIDEN": False,
        "PRECISION": "tf32" if kind == "bf16" else "ieee",
    }
    item_bytes = 2 if kind == "bf16" else 4
    for rows in (TILE_ROWS, 16):
        tile = tile_of(rows, head_dim, item_bytes, processor)
        yield Variant(
            chunk_attention,
            f"{kind}, d {head_dim}, {tile.rows} rows",
            {**common, **work},
            {**constants, "M": tile.rows, "N": tile.keys},
            {"num_warps": 8 if tile.rows >= 128 else 4, "num_stages": tile.stages},
        )
    extra = {"part_ptr": "*fp32", "weight_ptr": "*fp32", "length_ptr": "*i32", "first_row": "i32"}
    tile = tile_of(16, head_dim, item_bytes, processor, keys=64)
    for splits in (1, 8):
        yield Variant(
            decode_attention,
            f"{kind}, d {head_dim}, {splits} splits",
            {**common, **extra},
            {**constants, "HEADS": 32, "G": 16, "N": tile.keys, "SPLITS": splits},
            {"num_warps": 4, "num_stages": 3 if kind == "bf16" else 2},
        )
    yield Variant(
        merge_splits,
        f"{kind}, d {head_dim}, 8 splits",
        {
            "part_ptr": "*fp32",
            "weight_ptr": "*fp32",
            "out_ptr": f"*{kind}",
            "length_ptr": "*i32",
            "first_row": "i32",
            "stride_out": "i32",
        },
        {"HEADS": 32, "HEAD_DIM": head_dim, "D": head_dim, "SPLITS": 8, "S": 8},
        {"num_warps": 4},
    )


def _packed_variants() -> Iterator[Variant]:
    from executor.triton_kernels.packed_attention import packed_decode

    tensors = dict.fromkeys(("q_ptr", "out_ptr", "keys_ptr", "values_ptr"), "*bf16")
    codes = dict.fromkeys(("key_codes_ptr", "value_codes_ptr"), "*u8")
    scales = dict.fromkeys(("key_scale_ptr", "key_low_ptr", "value_scale_ptr", "value_low_ptr"), "*fp16")
    whole = dict.fromkeys(("tables_ptr", "length_ptr", "place_ptr"), "*i32")
    numbers = dict.fromkeys(
        ("first_row", "stride_q", "stride_out", "stride_place", "stride_codes", "stride_key_scale",
         "stride_value_scale", "stride_table"),
        "i32",
    )  # fmt: skip
    constants = {
        "SHARE": 4, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "D": 128, "N": 16, "G": 16, "BITS": 4, "WINDOW": 0,
        "PRECISION": "tf32",
    }  # fmt: skip
    signature = {**tensors, **codes, **scales, **whole, "log2_scale": "fp32", **numbers}
    yield Variant(packed_decode, "bf16, 4 bits", signature, constants, {"num_warps": 4})


def _fused_variants() -> Iterator[Variant]:
    from executor.triton_kernels.fused import rms_norm_rows, rotate_and_store_rows, silu_mul_rows

    for added in (False, True):
        yield Variant(
            rms_norm_rows,
            "residual" if added else "bf16",
            {
                **dict.fromkeys(("x_ptr", "added_ptr", "weight_ptr", "out_ptr"), "*bf16"),
                **dict.fromkeys(("stride_x", "stride_added", "stride_out"), "i32"),
                "eps": "fp32",
            },
            {"COLUMNS": 4096, "C": 4096, "ADD": added},
            {"num_warps": 8},
        )
    yield Variant(
        silu_mul_rows,
        "bf16",
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride_in": "i32", "stride_out": "i32"},
        {"COLUMNS": 14336, "C": 2048},
        {"num_warps": 4},
    )
    tensors = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr", "keys_ptr", "values_ptr")
    for normed in (False, True):
        yield Variant(
            rotate_and_store_rows,
            "q/k norm" if normed else "bf16",
            {
                **dict.fromkeys(tensors, "*bf16"),
                "positions_ptr": "*i32",
                "slots_ptr": "*i32",
                **dict.fromkeys(("stride_row", "stride_block", "stride_head", "stride_slot"), "i32"),
                "eps": "fp32",
            },
            {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "D": 128, "HALF": 64, "BLOCK_SIZE": 16, "NORMED": normed},
            {"num_warps": 1},
        )


def _expert_variants(kind: str, processor: Processor) -> Iterator[Variant]:
    """One layer of Qwen3-30B-A3B: 128 experts of width 768, 8 of them for each row."""
    from executor.triton_kernels import grouped_experts as grouped

    experts, hidden, width, top_k = 128, 2048, 768, 8
    laid = dict.fromkeys(("counts_ptr", "first_ptr", "tile_expert_ptr", "tile_place_ptr"), "*i32")
    of_experts = {"EXPERTS": experts, "E": experts}
    yield Variant(
        grouped.route_rows,
        f"{kind}, 8 of 128",
        {"logits_ptr": f"*{kind}", "ids_ptr": "*i32", "weights_ptr": "*fp32", "counts_ptr": "*i32", "rows": "i32",
         "stride_logits": "i32"},
        {**of_experts, "TOP_K": top_k, "NORM": True},
        {"num_warps": 1},
    )  # fmt: skip
    yield Variant(
        grouped.place_rows,
        "128 experts",
        {**dict.fromkeys(("ids_ptr", "first_ptr", "cursor_ptr", "sorted_ptr"), "*i32"), "slots": "i32"},
        {"B": 128},
        {"num_warps": 4},
    )
    yield Variant(
        grouped.sum_products,
        f"{kind}, 8 of 128",
        {"product_ptr": f"*{kind}", "out_ptr": f"*{kind}", "stride_out": "i32"},
        {"HIDDEN": hidden, "TOP_K": top_k, "C": 1024},
        {"num_warps": 4},
    )
    for rows in grouped.TILE_SIZES:
        tile = grouped.tile_of_experts(rows, 2 if kind == "bf16" else 4, processor)
        label = f"{kind}, {rows} rows an expert"
        yield Variant(
            grouped.lay_out_tiles, label, {**laid, "tiles": "i32"}, {**of_experts, "M": rows, "T": 32}, {"num_warps": 4}
        )
        constants = {
            "HIDDEN": hidden, "WIDTH": width, "M": tile.rows, "N": tile.columns, "K": tile.depth, "WIDEN": False,
            "PRECISION": "tf32" if kind == "bf16" else "ieee",
        }  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        given = dict.fromkeys(("x_ptr", "weights_ptr", "active_ptr"), f"*{kind}")
        yield Variant(
            grouped.gated_products,
            label,
            {**given, "sorted_ptr": "*i32", **laid, "stride_x": "i32"},
            {**constants, "TOP_K": top_k},
            options,
        )
        given = dict.fromkeys(("active_ptr", "weights_ptr", "product_ptr"), f"*{kind}")
        given |= {"share_ptr": "*fp32", "sorted_ptr": "*i32"}
        yield Variant(grouped.down_products, label, {**given, **laid}, constants, options)


def print_all(prog_name: str) -> None:
    """Print what each kernel takes on the capability of the command line."""
    text = sys.argv[1] if len(sys.argv) > 1 else "90"
    capability = whole_number(text)
    if capability is None or not min(SHARED_BYTES) <= capability < 1000:
        raise ExecutorError(f"{prog_name}: found {shown(text)}, expected a compute capability such as 80 or 90")
    for kernel, variant, shared, lines in build_all(capability):
        print(f"{kernel:<24} {variant:<24} {shared:>8} bytes shared {lines:>7} lines of PTX")


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    run_command(lambda: print_all, "executor.checks.kernel_build")


if __name__ == "__main__":
    main()
