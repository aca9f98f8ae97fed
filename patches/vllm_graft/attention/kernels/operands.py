"""Operands of the tensor cores from packed slots: the functions that the decode kernel is made of.

Addresses of a tile's slots, loads of packed codes as the products take them, and codes as exact fp16 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hadamard16(BITS: tl.constexpr):
    """fp16 [16, 16]: the Sylvester-Hadamard matrix of 2**BITS on the diagonal, repeated."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    common = i & j & ((1 << BITS) - 1)
    odd = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
    same = (i >> BITS) == (j >> BITS)
    return tl.where(same, 1.0 - 2.0 * odd.to(tl.float32), 0.0).to(tl.float16)


@triton.jit
def power_of_two(x):
    """The largest power of two up to each positive fp32 x; 1 for zero and subnormal x."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def to_fp16_rows(x):
    """Rows of x as fp16 with their largest element in [1, 2), and the power of two that each was divided by."""
    unit = power_of_two(tl.max(tl.abs(x), 1))
    return (x * (1.0 / unit)[:, None]).to(tl.float16), unit


@triton.jit
def rotate_rows(q, M: tl.constexpr, D: tl.constexpr):
    """q [M, D] fp16 times the Sylvester-Hadamard matrix of D, not normalized, as fp32: two products with 16 x 16.

    What the first leaves beyond fp16 takes part in the second, so that nothing is rounded on the way.
    """
    HIGH: tl.constexpr = D // 16
    BITS: tl.constexpr = 4 if D == 256 else (3 if D == 128 else 2)
    sums = tl.dot(tl.reshape(q, [M * HIGH, 16]), _hadamard16(4)) * 0.0625
    high = sums.to(tl.float16)
    both = tl.dot(_across(high, M, HIGH), _hadamard16(BITS))
    both = tl.dot(_across((sums - high.to(tl.float32)).to(tl.float16), M, HIGH), _hadamard16(BITS), both)
    return tl.reshape(tl.permute(tl.reshape(both, [M, 16, HIGH]), [0, 2, 1]), [M, D]) * 16.0


@triton.jit
def _across(x, M: tl.constexpr, HIGH: tl.constexpr):
    """[M * HIGH, 16], a row of HIGH x 16 numbers each, as [M * HIGH, 16] of columns."""
    return tl.reshape(tl.permute(tl.reshape(x, [M, HIGH, 16]), [0, 2, 1]), [M * HIGH, 16])


@triton.jit
def codes4(words, ASSEMBLY: tl.constexpr):
    """The four 4-bit codes of each 16-bit word less 8, as exact fp16, one tensor for each.

    Two codes at a time, which Triton does not find: the bits 0x6400 | code are 1024 + code, 0x5400 | 16 code 64 + code.
    """
    if ASSEMBLY:
        c0 = _nibbles(words, "0", "0x000F000F", "0x64006400", "0x64086408")
        c1 = _nibbles(words, "0", "0x00F000F0", "0x54005400", "0x54805480")
        c2 = _nibbles(words, "8", "0x000F000F", "0x64006400", "0x64086408")
        c3 = _nibbles(words, "8", "0x00F000F0", "0x54005400", "0x54805480")
    else:
        c0 = _code(words, 0, 4)
        c1 = _code(words, 1, 4)
        c2 = _code(words, 2, 4)
        c3 = _code(words, 3, 4)
    return c0, c1, c2, c3


@triton.jit
def _nibbles(words, SHIFT: tl.constexpr, MASK: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr):
    """One code of each word; instructions of one result, not of several, are computed in the product's layout."""
    LOAD: tl.constexpr = "{ .reg .b32 t, base, bias; mov.b32 base, " + BASE + "; mov.b32 bias, " + BIAS
    PICK: tl.constexpr = "; shr.u32 t, $1, " + SHIFT + "; lop3.b32 t, t, " + MASK + ", base, 0xEA; "
    return tl.inline_asm_elementwise(
        LOAD + PICK + "sub.f16x2 $0, t, bias; }", "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def codes3(words, ASSEMBLY: tl.constexpr):
    """The eight 3-bit codes of each word's low 24 bits less 4, as exact fp16, one tensor for each."""
    if ASSEMBLY:
        c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, v, a, b, p, q, r, x, y, z;
            mov.b32 p, 0x64006400; mov.b32 x, 0x64046404;
            mov.b32 q, 0x58005800; mov.b32 y, 0x58205820;
            mov.b32 r, 0x4C004C00; mov.b32 z, 0x4D004D00;
            prmt.b32 a, $8, $9, 0x5410;
            shr.u32 u, $8, 15; shr.u32 v, $9, 15; prmt.b32 b, u, v, 0x5410;
            shr.u32 u, a, 9;
            lop3.b32 t, a, 0x00070007, p, 0xEA; sub.f16x2 $0, t, x;
            lop3.b32 t, a, 0x00380038, q, 0xEA; sub.f16x2 $1, t, y;
            lop3.b32 t, a, 0x01C001C0, r, 0xEA; sub.f16x2 $2, t, z;
            lop3.b32 t, u, 0x00070007, p, 0xEA; sub.f16x2 $3, t, x;
            lop3.b32 t, u, 0x00380038, q, 0xEA; sub.f16x2 $4, t, y;
            lop3.b32 t, b, 0x00070007, p, 0xEA; sub.f16x2 $5, t, x;
            lop3.b32 t, b, 0x00380038, q, 0xEA; sub.f16x2 $6, t, y;
            lop3.b32 t, b, 0x01C001C0, r, 0xEA; sub.f16x2 $7, t, z;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        c0 = _code(words, 0, 3)
        c1 = _code(words, 1, 3)
        c2 = _code(words, 2, 3)
        c3 = _code(words, 3, 3)
        c4 = _code(words, 4, 3)
        c5 = _code(words, 5, 3)
        c6 = _code(words, 6, 3)
        c7 = _code(words, 7, 3)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _code(words, plane: tl.constexpr, BITS: tl.constexpr):
    return ((words >> (plane * BITS)) & ((1 << BITS) - 1)).to(tl.float16) - (1 << BITS - 1)


@triton.jit
def centroids4(words, CODEBOOK: tl.constexpr, LOOKUP: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp16 centroids of the four 4-bit codes of each 16-bit word, one tensor for each."""
    if ASSEMBLY:
        four = tl.inline_asm_elementwise(LOOKUP, "=&l,=&l,r", [words], dtype=tl.int64, is_pure=True, pack=2)
        c0 = _half_of(four, "x, z, 0x5410")
        c1 = _half_of(four, "x, z, 0x7632")
        c2 = _half_of(four, "y, w, 0x5410")
        c3 = _half_of(four, "y, w, 0x7632")
    else:
        c0 = _centroid(words, 0, 4, CODEBOOK)
        c1 = _centroid(words, 1, 4, CODEBOOK)
        c2 = _centroid(words, 2, 4, CODEBOOK)
        c3 = _centroid(words, 3, 4, CODEBOOK)
    return c0, c1, c2, c3


@triton.jit
def _half_of(four, CHOICE: tl.constexpr):
    """One of the four fp16 numbers in each 64 bits: two of them are chosen at a time."""
    SPLIT: tl.constexpr = "{ .reg .b32 x, y, z, w; mov.b64 {x, y}, $1; mov.b64 {z, w}, $2; prmt.b32 $0, "
    return tl.inline_asm_elementwise(SPLIT + CHOICE + "; }", "=r,l,l", [four], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def centroids3(words, CODEBOOK: tl.constexpr, LOOKUP: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp16 centroids of the eight 3-bit codes of each word's low 24 bits, one tensor for each."""
    if ASSEMBLY:
        c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
            LOOKUP,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        c0 = _centroid(words, 0, 3, CODEBOOK)
        c1 = _centroid(words, 1, 3, CODEBOOK)
        c2 = _centroid(words, 2, 3, CODEBOOK)
        c3 = _centroid(words, 3, 3, CODEBOOK)
        c4 = _centroid(words, 4, 3, CODEBOOK)
        c5 = _centroid(words, 5, 3, CODEBOOK)
        c6 = _centroid(words, 6, 3, CODEBOOK)
        c7 = _centroid(words, 7, 3, CODEBOOK)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _centroid(words, plane: tl.constexpr, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    code = (words >> (plane * BITS)) & ((1 << BITS) - 1)
    value = tl.full(code.shape, CODEBOOK[0], tl.float16)
    for index in tl.static_range(1, 1 << BITS):
        value = tl.where(code == index, tl.full(code.shape, CODEBOOK[index], tl.float16), value)
    return value


@triton.jit
def anew(x, tile, RELOAD: tl.constexpr):
    """x again, as if it depended on the tile: then the product's operand is not kept in registers over all tiles."""
    if RELOAD:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r,r",
            [x, tl.full(x.shape, 0, tl.int16) + tile.to(tl.int16)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return x


@triton.jit
def pair_rows(low, high):
    """[W, N] and [W, N] as [2 W, N], alternating."""
    return tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [2 * low.shape[0], low.shape[1]])


@triton.jit
def pair_columns(low, high):
    """[N, W] and [N, W] as [N, 2 W], alternating."""
    return tl.reshape(tl.join(low, high), [low.shape[0], 2 * low.shape[1]])


@triton.jit
def load_page(pages, tile, last, N: tl.constexpr, PAGE: tl.constexpr):
    """The page of a tile of N tokens: tiles begin at multiples of N, so a number where N <= PAGE, else [N] of them.

    Past the last token it stays a page of the request, so that loads need no mask.
    """
    token = tile * N if N <= PAGE else tile * N + tl.arange(0, N)
    return tl.load(pages + tl.minimum(token, last) // PAGE)


@triton.jit
def tile_slots(cache, page, tile, STRIDE_PAGE, STRIDE_TOKEN, N: tl.constexpr, PAGE: tl.constexpr):
    """Pointers [N] to the slots of a tile's tokens, in units of 16 bits."""
    n = tl.arange(0, N)
    first = cache + page.to(tl.int64) * STRIDE_PAGE
    return first + (tile * N % PAGE + n if N <= PAGE else n % PAGE) * STRIDE_TOKEN


@triton.jit
def prefetch(slots, BYTES: tl.constexpr, LEVEL: tl.constexpr):
    """Ask for the cache lines of slots [N] ahead of their loads, which are too narrow for an asynchronous copy."""
    LINES: tl.constexpr = triton.next_power_of_2((BYTES + 127) // 128)
    line = tl.arange(0, LINES)
    offset = tl.minimum(line * 128, BYTES - 2) // 2
    tl.inline_asm_elementwise(
        "prefetch.global." + LEVEL + " [$1]; mov.b32 $0, 0;",
        "=r,l",
        [slots[:, None] + offset[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_words(rows, D: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr):
    """Packed codes at rows [N] of 16-bit units: [N, D / 4] words of four 4-bit or [N, D / 8] of eight 3-bit codes.

    Keys come transposed, as the product takes them.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(D // 4 if BITS == 4 else D // 8)
    unit = tl.arange(0, BLOCK)
    if BITS == 4:
        where = rows[None, :] + unit[:, None] if KEYS else rows[:, None] + unit[None, :]
        if BLOCK == D // 4:
            words = tl.load(where)
        else:
            there = (unit < D // 4)[:, None] if KEYS else (unit < D // 4)[None, :]
            words = tl.load(where, mask=there, other=0)
    else:  # three bytes, of which an odd group's begin in the middle of a 16-bit unit
        first = (3 * unit - (unit & 1)) // 2
        shift = 8 * (unit & 1)
        where = rows[None, :] + first[:, None] if KEYS else rows[:, None] + first[None, :]
        shift = shift[:, None] if KEYS else shift[None, :]
        words = (tl.load(where).to(tl.int32) | (tl.load(where + 1).to(tl.int32) << 16)) >> shift
    return words


@triton.jit
def load_keys(rows, D: tl.constexpr, BITS: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Packed keys at rows [N], transposed: [D, N] bytes of FP8 for the hardware's conversion, else words of 16 bits."""
    if BITS == 8:
        WIDTH: tl.constexpr = D if HARDWARE_FP8 else D // 2
        BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
        unit = tl.arange(0, BLOCK)
        where = rows.to(tl.pointer_type(tl.uint8)) if HARDWARE_FP8 else rows
        where = where[None, :] + unit[:, None]
        keys = tl.load(where) if BLOCK == WIDTH else tl.load(where, mask=(unit < WIDTH)[:, None], other=0)
    else:
        keys = load_words(rows, D, BITS, True)
    return keys


@triton.jit
def load_half(rows):
    """The fp16 number at each row, as fp32 [N]."""
    return tl.load(rows).to(tl.float16, bitcast=True).to(tl.float32)
