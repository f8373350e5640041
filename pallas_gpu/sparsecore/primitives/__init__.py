# SPDX-License-Identifier: Apache-2.0
"""Operations of SparseCores: a file per family, with public functions and checks.

The primitives of each family, with their operands by name and their parameters. `ref`
stands for an `Access` of the program, `?` for an operand that may be None.

    copies     copy_start          src=ref dst=ref semaphore=ref indices=ref|vector?
                                   indexed="src"|"dst"|None, ignored_value=int|None,
                                   add=bool, priority=int
               copy_wait           the same operands; indexed, ignored_value
    sync       semaphore_signal    semaphore=ref inc core? subcore?
               semaphore_wait      semaphore=ref value
               semaphore_read      semaphore=ref -> i32
               subcore_barrier     (none)
               fetch_and_add       ref=ref(SMEM scalar) value subcore -> i32
    gathers    load_gather         ref=ref indices=(vector, ...) mask? -> vector
               store_scatter       ref=ref indices=(vector, ...) value mask?; add=bool
               load_expanded       ref=ref mask -> vector
               store_compressed    ref=ref value mask; add=bool
    scans      masked_scan         x mask?; kind="sum"|"max"|"min" -> vector
               scan_count          x mask -> counts (i32), last occurrences (bool)
               mask_reduce         x; kind="population_count"|"ffs", reduce=int -> i32
               sort_key_val        keys values mask?; descending=bool
                                   -> keys, values[, mask]
    packing    pack                a b; format="interleaved"|"compressed", dtype
               unpack              x; format, dtype -> two vectors
               bitcast             x; dtype
    loops      parallel_loop       consts..., carries..., lower, upper, step (flat);
                                   jaxpr (consts, carries, index -> carries),
                                   num_consts, num_carry, length=int|None, unroll=int

In `copy_start` the side named by `indexed` is the whole table, of shape (z, *rest), and
the other one has shape (n, *rest) for n indices.
"""
