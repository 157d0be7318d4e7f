// The kernels of `NetworkKernel`. This source follows `kernels.cu`, which has the rules and the helpers.

#if NORMALISE || AFFINE || GATHER
// Splits a number into indices along axes, the innermost axis first. Adds index times step of each axis to an operand's offset.
template <int RANKS, int ARRAYS>
HELPER void walk(count_t number, const offset_t* extents, const offset_t (*steps)[RANKS], offset_t (&offsets)[ARRAYS]) {
#pragma unroll
    for (int axis = 0; axis < RANKS; ++axis) {
        offset_t place = number;
        if (axis < RANKS - 1) {
            place = number % (count_t)extents[axis];
            number /= (count_t)extents[axis];
        }
#pragma unroll
        for (int k = 0; k < ARRAYS; ++k) offsets[k] += place * steps[k][axis];
    }
}
#endif

#if NORMALISE || AFFINE
// Parameters, such as the weight, may be float32 although the array is not.
#if SINGLE
typedef float PARAMETER;
HELPER float of_parameter(PARAMETER x) { return x; }
#else
typedef ELEMENT PARAMETER;
HELPER float of_parameter(PARAMETER x) { return widen(x); }
#endif

struct alignas(PACK * sizeof(PARAMETER) < 16 ? PACK * sizeof(PARAMETER) : 16) Parameters {
    PARAMETER of[PACK];
};

// Loads the parameters of a pack. WAY is 0 if one element serves the pack, 1 for neighbours, and 2 for elements at a step.
template <int WAY>
HELPER void load(const void* parameters, offset_t first, offset_t step, float (&values)[PACK]) {
    const PARAMETER* at = (const PARAMETER*)parameters + first;
    if (WAY == 1) {
        const Parameters pack = *(const Parameters*)at;
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] = of_parameter(pack.of[e]);
    } else {
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] = of_parameter(at[WAY ? e * step : 0]);
    }
}
#endif

#if NORMALISE
// The outer axes distinguish rows, and the inner axes lie in a row. Each axis has steps for x, the weight, the bias and y. Steps
// of x and y are counted in packs, and steps of parameters in elements. With ACROSS, a pack has an element of each of PACK rows.
// Without ACROSS, a pack lies in one row.
struct Normalise {
    offset_t rows, count, elements, eps, leap[2];
    offset_t outer[OUTER], outer_steps[4][OUTER], inner[INNER], inner_steps[4][INNER];
};

HELPER float merged(bool largest, float a, float b) { return !largest ? a + b : b > a ? b : a; }

// Joins the numbers of all threads of a row. All threads of a block call this function together. It returns after every thread of
// the row has read its part of the row. So the row may be overwritten from then on.
template <int COUNT>
HELPER void join(bool largest, int lane, int share, float* parts, float (&values)[COUNT]) {
#if ACROSS
#pragma unroll
    for (int e = 0; e < COUNT; ++e) parts[(share * LANES + lane) * COUNT + e] = values[e];
    for (int half = SHARES / 2; half; half /= 2) {
        __syncthreads();
        if (share < half) {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                float* own = parts + (share * LANES + lane) * COUNT + e;
                *own = merged(largest, *own, own[half * LANES * COUNT]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < COUNT; ++e) values[e] = parts[lane * COUNT + e];
    // The next sums may overwrite these parts only after every thread has read them.
    __syncthreads();
#else
    constexpr int together = SHARES < 32 ? SHARES : 32, warps = SHARES / together;
#pragma unroll
    for (int offset = together / 2; offset; offset /= 2)
        values[0] = merged(largest, values[0], __shfl_xor_sync(0xffffffffu, values[0], offset));
    if (warps > 1) {
        if (share % together == 0) parts[lane * warps + share / together] = values[0];
        __syncthreads();
        values[0] = parts[lane * warps];
#pragma unroll
        for (int warp = 1; warp < warps; ++warp) values[0] = merged(largest, values[0], parts[lane * warps + warp]);
        __syncthreads();
    }
#endif
}

// Loops over this thread's packs of a row. This is a macro, because NVRTC refuses a generic function object as the body.
#if EACH
#define FOR_EACH_PACK(i) \
    _Pragma("unroll") for (int k = 0; k < EACH; ++k) \
        if (const count_t i = share + k * SHARES; i < count)
#define PACK_AT(i) kept[k]
#else
#define FOR_EACH_PACK(i) for (count_t i = share; i < count; i += SHARES)
#define PACK_AT(i) read(i)
#endif

// A block computes LANES rows, or packs of rows, each by SHARES threads. Each thread keeps up to EACH packs in registers. If EACH
// is 0, the thread reads its packs again. Threads behind the last row compute the last row once more and write nothing,
// because sums need all threads of a block.
ENTRY void __launch_bounds__(LANES * SHARES) normalise(BY_VALUE Pointers operands, BY_VALUE Normalise g) {
    constexpr int together = ACROSS ? PACK : 1;
    __shared__ float parts[ACROSS ? LANES * SHARES * PACK : LANES * SHARES];
#if ACROSS
    const int lane = threadIdx.x % LANES, share = threadIdx.x / LANES;
#else
    const int lane = threadIdx.x / SHARES, share = threadIdx.x % SHARES;
#endif
    const Pack* x = (const Pack*)operands.at[0];
    const void *weight = operands.at[1], *bias = operands.at[1 + WEIGHTED];
    Pack* y = (Pack*)operands.at[1 + WEIGHTED + BIASED];
    const count_t count = g.count, rows = g.rows;
    const float eps = __int_as_float((int)g.eps), elements = (float)g.elements;
    for (count_t first = (count_t)blockIdx.x * LANES; first < rows; first += (count_t)gridDim.x * LANES) {
        const bool there = first + lane < rows;
        offset_t row[4] = {};
        walk<OUTER>(there ? first + lane : rows - 1, g.outer, g.outer_steps, row);
        auto place = [&](count_t i, offset_t (&offsets)[4]) {
#pragma unroll
            for (int k = 0; k < 4; ++k) offsets[k] = row[k];
            walk<INNER>(i, g.inner, g.inner_steps, offsets);
        };
        auto read = [&](count_t i) {
            offset_t offsets[4];
            place(i, offsets);
            return x[offsets[0]];
        };
#if EACH
        Pack kept[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const count_t i = share + k * SHARES;
            kept[k] = read(i < count ? i : count - 1);
        }
#endif
        float less[together], scale[together];
#pragma unroll
        for (int e = 0; e < together; ++e) {
            less[e] = SOFTMAX ? -__int_as_float(0x7f800000) : 0;
            scale[e] = 0;
        }
#if SOFTMAX
        FOR_EACH_PACK(i) {
            const Pack pack = PACK_AT(i);
#pragma unroll
            for (int e = 0; e < PACK; ++e) less[ACROSS ? e : 0] = merged(true, less[ACROSS ? e : 0], widen(pack.of[e]));
        }
        join(true, lane, share, parts, less);
#elif MEAN
        FOR_EACH_PACK(i) {
            const Pack pack = PACK_AT(i);
#pragma unroll
            for (int e = 0; e < PACK; ++e) less[ACROSS ? e : 0] += widen(pack.of[e]);
        }
        join(false, lane, share, parts, less);
#pragma unroll
        for (int e = 0; e < together; ++e) less[e] /= elements;
#endif
#if SOFTMAX && EACH
        float terms[EACH][PACK];  // an exponential takes longer than to keep it
#endif
        FOR_EACH_PACK(i) {
            const Pack pack = PACK_AT(i);
#pragma unroll
            for (int e = 0; e < PACK; ++e) {
                const float value = widen(pack.of[e]) - less[ACROSS ? e : 0], term = SOFTMAX ? expf(value) : value * value;
                scale[ACROSS ? e : 0] += term;
#if SOFTMAX && EACH
                terms[k][e] = term;
#endif
            }
        }
        join(false, lane, share, parts, scale);
#pragma unroll
        for (int e = 0; e < together; ++e) scale[e] = 1 / (SOFTMAX ? scale[e] : sqrtf(scale[e] / elements + eps));
        if (there)
            FOR_EACH_PACK(i) {
                const Pack pack = PACK_AT(i);
                offset_t offsets[4];
                place(i, offsets);
                float values[PACK], parameters[PACK];
#pragma unroll
                for (int e = 0; e < PACK; ++e) {
#if SOFTMAX && EACH
                    values[e] = terms[k][e] * scale[ACROSS ? e : 0];
#else
                    const float value = widen(pack.of[e]) - less[ACROSS ? e : 0];
                    values[e] = (SOFTMAX ? expf(value) : value) * scale[ACROSS ? e : 0];
#endif
                }
#if WEIGHTED
                load<WEIGHT_WAY>(weight, offsets[1], g.leap[0], parameters);
#pragma unroll
                for (int e = 0; e < PACK; ++e) values[e] *= parameters[e];
#endif
#if BIASED
                load<BIAS_WAY>(bias, offsets[2], g.leap[1], parameters);
#pragma unroll
                for (int e = 0; e < PACK; ++e) values[e] += parameters[e];
#endif
                Pack result;
#pragma unroll
                for (int e = 0; e < PACK; ++e) result.of[e] = narrow(values[e]);
                y[offsets[3]] = result;
            }
    }
}
#endif

#if AFFINE
// The operands of `steps` are x, the means, the variances, the weight, the bias and y, in this order.
struct Affine {
    offset_t count, eps, leap[4], extents[RANK], steps[6][RANK];
};

ENTRY void affine(BY_VALUE Pointers operands, BY_VALUE Affine g) {
    const Pack* x = (const Pack*)operands.at[0];
    const void *weight = operands.at[3], *bias = operands.at[3 + WEIGHTED];
    Pack* y = (Pack*)operands.at[3 + WEIGHTED + BIASED];
    const float eps = __int_as_float((int)g.eps);
    FOR_EACH_INDEX(i, g.count) {
        offset_t offsets[6] = {};
        walk<RANK>(i, g.extents, g.steps, offsets);
        const Pack pack = x[offsets[0]];
        float values[PACK], parameters[PACK];
        load<MEAN_WAY>(operands.at[1], offsets[1], g.leap[0], parameters);
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] = widen(pack.of[e]) - parameters[e];
        load<VARIANCE_WAY>(operands.at[2], offsets[2], g.leap[1], parameters);
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] *= 1 / sqrtf(parameters[e] + eps);
#if WEIGHTED
        load<WEIGHT_WAY>(weight, offsets[3], g.leap[2], parameters);
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] *= parameters[e];
#endif
#if BIASED
        load<BIAS_WAY>(bias, offsets[4], g.leap[3], parameters);
#pragma unroll
        for (int e = 0; e < PACK; ++e) values[e] += parameters[e];
#endif
        Pack result;
#pragma unroll
        for (int e = 0; e < PACK; ++e) result.of[e] = narrow(activated(values[e]));
        y[offsets[5]] = result;
    }
}
#endif

#if GATHER
// The axes are the output's, the innermost first. Along a padded axis, an index outside x is clipped or mirrored, or gets the
// constant. ELEMENT has the bits of an element, so that one variant serves all types of one size.
struct Gather {
    // The operands of `steps` are x and y. Steps are counted in packs.
    offset_t count, low, high, extents[RANK], steps[2][RANK];
    // `before` is the number of output elements before the first element of x. `within` is the extent of x, or 0 without padding.
    offset_t before[RANK], within[RANK];
};

ENTRY void gather(BY_VALUE Pointers operands, BY_VALUE Gather g) {
    const Pack* x = (const Pack*)operands.at[0];
    Pack* y = (Pack*)operands.at[1];
#if CONSTANT
    Pack around;
    const unsigned long long bits = (unsigned long long)(unsigned)g.high << 32 | (unsigned)g.low;
#pragma unroll
    for (int e = 0; e < PACK; ++e) around.of[e] = (ELEMENT)bits;
#endif
    FOR_EACH_INDEX(i, g.count) {
        count_t number = i;
        offset_t from = 0, to = 0;
        bool inside = true;
#pragma unroll
        for (int axis = 0; axis < RANK; ++axis) {
            offset_t place = number;
            if (axis < RANK - 1) {
                place = number % (count_t)g.extents[axis];
                number /= (count_t)g.extents[axis];
            }
            to += place * g.steps[1][axis];
#if CONSTANT || REFLECT || REPLICATE
            const offset_t within = g.within[axis];
            if (within) {
                place -= g.before[axis];
#if REFLECT
                if (place < 0) place = -place;
                if (place >= within) place = 2 * within - 2 - place;
#endif
                const offset_t nearest = place < 0 ? 0 : place < within ? place : within - 1;
                inside = inside && nearest == place;
                place = nearest;
            }
#endif
            from += place * g.steps[0][axis];
        }
        Pack pack = x[from];
#if CONSTANT
        if (!inside) pack = around;
#endif
        y[to] = pack;
    }
}
#endif

#if RESAMPLE
struct Resample {
    // As `Images` of `kernels.cu`.
    struct {
        offset_t channels, height, width, from[4], to[4];
    } images;
    offset_t count, rows, columns, scale[2];
};

// Returns the coordinate in the input for an output pixel, as torch computes it.
HELPER float source(offset_t place, float scale) {
#if BILINEAR && !CORNERS
    const float found = scale * ((float)place + 0.5f) - 0.5f;
    return found < 0 ? 0 : found;
#else
    return scale * (float)place;
#endif
}

ENTRY void resample(BY_VALUE Pointers operands, BY_VALUE Resample g) {
    const float down = __int_as_float((int)g.scale[0]), along = __int_as_float((int)g.scale[1]);
    FOR_EACH_INDEX(i, g.count) {
        count_t rest = i;
#if CHANNELS_INNERMOST
        const offset_t c = rest % (count_t)g.images.channels;
        rest /= (count_t)g.images.channels;
#endif
        const offset_t q = rest % (count_t)g.columns;
        rest /= (count_t)g.columns;
        const offset_t p = rest % (count_t)g.rows;
        rest /= (count_t)g.rows;
#if !CHANNELS_INNERMOST
        const offset_t c = rest % (count_t)g.images.channels;
        rest /= (count_t)g.images.channels;
#endif
        const offset_t n = rest;
        const Pack* x = (const Pack*)operands.at[0] + (n * g.images.from[0] + c * g.images.from[1]);
        const float row = source(p, down), column = source(q, along);
        const offset_t bottom = g.images.height - 1, right = g.images.width - 1;
        const offset_t r = (offset_t)row < bottom ? (offset_t)row : bottom, s = (offset_t)column < right ? (offset_t)column : right;
        Pack y;
#if BILINEAR
        const offset_t below = r < bottom ? r + 1 : r, beside = s < right ? s + 1 : s;
        const Pack a = x[r * g.images.from[2] + s * g.images.from[3]], b = x[r * g.images.from[2] + beside * g.images.from[3]];
        const Pack c0 = x[below * g.images.from[2] + s * g.images.from[3]], d = x[below * g.images.from[2] + beside * g.images.from[3]];
        const float v = row - (float)r, h = column - (float)s;
#pragma unroll
        for (int e = 0; e < PACK; ++e) {
            const float upper = (1 - h) * widen(a.of[e]) + h * widen(b.of[e]), lower = (1 - h) * widen(c0.of[e]) + h * widen(d.of[e]);
            y.of[e] = narrow((1 - v) * upper + v * lower);
        }
#else
        y = x[r * g.images.from[2] + s * g.images.from[3]];
#endif
        Pack* to = (Pack*)operands.at[1] + (n * g.images.to[0] + c * g.images.to[1]);
        to[p * g.images.to[2] + q * g.images.to[3]] = y;
    }
}
#endif

#if SQUEEZE
// The images as in `kernels.cu`, then the number of blocks for all channel packs, packs per block, pixels per part, and parts.
struct Squeeze {
    struct {
        offset_t channels, height, width, from[4], to[4];
    } images;
    offset_t blocks, lanes, each, parts;
};

// Sums the pixels of a part of an image. A block has some channel packs of a part. Its threads share the pixels in turn.
ENTRY void __launch_bounds__(MOST) squeeze(BY_VALUE Pointers operands, BY_VALUE Squeeze g) {
    __shared__ float sums[MOST * PACK];
    const int lanes = g.lanes, shares = blockDim.x / lanes;
#if CHANNELS_INNERMOST
    const int lane = threadIdx.x % lanes, share = threadIdx.x / lanes;
#else
    const int lane = threadIdx.x / shares, share = threadIdx.x % shares;
#endif
    const count_t tiles = (g.images.channels + lanes - 1) / lanes;
    const offset_t pixels = g.images.height * g.images.width, first = (offset_t)blockIdx.y * g.each;
    const offset_t end = first + g.each < pixels ? first + g.each : pixels;
    for (count_t block = blockIdx.x; block < (count_t)g.blocks; block += gridDim.x) {
        const offset_t n = block / tiles, c = block % tiles * lanes + lane;
        float sum[PACK] = {};
        if (c < g.images.channels) {
            const Pack* x = (const Pack*)operands.at[0] + (n * g.images.from[0] + c * g.images.from[1]);
            constexpr int at_once = 4;  // a load past the end reads the last pixel, and its value is not used
            for (offset_t i = first + share; i < end; i += at_once * shares) {
                Pack seen[at_once];
#pragma unroll
                for (int k = 0; k < at_once; ++k) {
                    const count_t pixel = i + k * shares < end ? i + k * shares : end - 1;
                    const offset_t row = pixel / (count_t)g.images.width, column = pixel % (count_t)g.images.width;
                    seen[k] = x[row * g.images.from[2] + column * g.images.from[3]];
                }
                LOADED;
#pragma unroll
                for (int k = 0; k < at_once; ++k)
#pragma unroll
                    for (int e = 0; e < PACK; ++e)
                        if (i + k * shares < end) sum[e] += widen(seen[k].of[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < PACK; ++e) sums[(share * lanes + lane) * PACK + e] = sum[e];
        for (int left = shares; left > 1;) {
            const int half = (left + 1) / 2;
            __syncthreads();
            if (share < left - half)
#pragma unroll
                for (int e = 0; e < PACK; ++e)
                    sums[(share * lanes + lane) * PACK + e] += sums[((share + half) * lanes + lane) * PACK + e];
            left = half;
        }
        if (share == 0 && c < g.images.channels) {  // this thread wrote the last sums itself
            float* y = (float*)operands.at[1] + ((n * g.parts + blockIdx.y) * g.images.channels + c) * PACK;
#pragma unroll
            for (int e = 0; e < PACK; ++e) y[e] = sums[lane * PACK + e];
        }
        __syncthreads();  // the next sums must not overwrite sums that another thread still reads
    }
}
#endif

#if LAYER
// The numbers of channel packs, of parts, of results per image, of results in all, and of pixels.
struct Layer {
    offset_t channels, parts, squeezed, rows, pixels;
};

// Each warp computes one result at a time. All threads loop equally often, because they join their numbers.
ENTRY void __launch_bounds__(THREADS) layer(BY_VALUE Pointers operands, BY_VALUE Layer g) {
    constexpr int warps = THREADS / 32;
    const offset_t channels = g.channels * PACK;
    for (count_t begin = (count_t)blockIdx.x * warps; begin < (count_t)g.rows; begin += (count_t)gridDim.x * warps) {
        const count_t own = begin + threadIdx.x / 32, row = own < (count_t)g.rows ? own : g.rows - 1;
        const offset_t n = row / (count_t)g.squeezed, s = row % (count_t)g.squeezed;
        const float* sums = (const float*)operands.at[1] + n * g.parts * channels;
        const Pack* weights = (const Pack*)operands.at[2] + s * g.channels;
        float sum = 0;
#pragma unroll 4
        for (offset_t c = threadIdx.x % 32; c < g.channels; c += 32) {
            const Pack pack = weights[c];
            float pixels[PACK] = {};
            for (offset_t part = 0; part < g.parts; ++part)
#pragma unroll
                for (int e = 0; e < PACK; ++e) pixels[e] += sums[part * channels + c * PACK + e];
#pragma unroll
            for (int e = 0; e < PACK; ++e) sum += widen(pack.of[e]) * (pixels[e] / (float)g.pixels);
        }
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (threadIdx.x % 32 == 0 && own < (count_t)g.rows)
            ((float*)operands.at[4])[row] = activated(sum + widen(((const ELEMENT*)operands.at[3])[s]));
    }
}
#endif

#if EXCITE
// As `Squeeze`, but `each` is the number of pixels per block. `squeezed` is the number of results of the first layer.
struct Excite {
    struct {
        offset_t channels, height, width, from[4], to[4];
    } images;
    offset_t blocks, lanes, each, parts, squeezed;
};

// Each block computes the first layer for its image, or, with LAYERED, reads the result of the first layer. Then the block
// computes the second layer for its channels, and scales its part of the image.
ENTRY void __launch_bounds__(THREADS) excite(BY_VALUE Pointers operands, BY_VALUE Excite g) {
    __shared__ float hidden[SQUEEZED], gates[LANES * PACK];
#if !LAYERED
    __shared__ float means[CHANNELS];
#endif
    constexpr int second = LAYERED ? 2 : 4;  // the place of the second layer among the operands
    const int thread = threadIdx.x, lanes = g.lanes;
    const count_t tiles = (g.images.channels + lanes - 1) / lanes;
    const offset_t channels = g.images.channels * PACK, pixels = g.images.height * g.images.width;
    const offset_t first = (offset_t)blockIdx.y * g.each, end = first + g.each < pixels ? first + g.each : pixels;
    for (count_t block = blockIdx.x; block < (count_t)g.blocks; block += gridDim.x) {
        const offset_t n = block / tiles, from = block % tiles * lanes;
#if LAYERED
        for (offset_t s = thread; s < g.squeezed; s += THREADS) hidden[s] = ((const float*)operands.at[1])[n * g.squeezed + s];
#else
        const float* sums = (const float*)operands.at[1] + n * g.parts * channels;
        for (offset_t c = thread; c < channels; c += THREADS) {
            float sum = 0;
#pragma unroll 4
            for (offset_t part = 0; part < g.parts; ++part) sum += sums[part * channels + c];
            means[c] = sum / (float)pixels;
        }
        __syncthreads();
        // The threads of a warp share a row of the first layer, and 8 threads share a row of the second layer. All threads loop
        // equally often, because they join their numbers.
        for (offset_t begin = 0; begin < g.squeezed; begin += THREADS / 32) {
            const offset_t s = begin + thread / 32;
            const Pack* row = (const Pack*)operands.at[2] + (s < g.squeezed ? s : g.squeezed - 1) * g.images.channels;
            float sum = 0;
#pragma unroll 4
            for (offset_t c = thread % 32; c < g.images.channels; c += 32) {
                const Pack pack = row[c];
#pragma unroll
                for (int e = 0; e < PACK; ++e) sum += widen(pack.of[e]) * means[c * PACK + e];
            }
#pragma unroll
            for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (thread % 32 == 0 && s < g.squeezed) hidden[s] = activated(sum + widen(((const ELEMENT*)operands.at[3])[s]));
        }
#endif
        __syncthreads();
        for (int begin = 0; begin < lanes * PACK; begin += THREADS / 8) {
            const int own = begin + thread / 8;
            const offset_t c = from * PACK + own, row = c < channels ? c : channels - 1;
            float sum = 0;
#pragma unroll 8
            for (offset_t s = thread % 8; s < g.squeezed; s += 8)
                sum += widen(((const ELEMENT*)operands.at[second])[row * g.squeezed + s]) * hidden[s];
#pragma unroll
            for (int offset = 4; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (thread % 8 == 0 && own < lanes * PACK) {
                sum += widen(((const ELEMENT*)operands.at[second + 1])[row]);
#if HARD_GATE
                gates[own] = sum <= -3 ? 0 : sum >= 3 ? 1 : (sum + 3) / 6;  // NaN stays
#else
                gates[own] = 1 / (1 + expf(-sum));
#endif
            }
        }
        __syncthreads();
        const count_t own = (count_t)(end - first) * lanes;
        for (count_t i = thread; i < own; i += THREADS) {
#if CHANNELS_INNERMOST
            const offset_t lane = i % (count_t)lanes, pixel = first + i / (count_t)lanes;
#else
            const offset_t lane = i / (count_t)(end - first), pixel = first + i % (count_t)(end - first);
#endif
            const offset_t c = from + lane;
            if (c >= g.images.channels) continue;
            const offset_t row = pixel / (count_t)g.images.width, column = pixel % (count_t)g.images.width;
            const Pack x = ((const Pack*)operands.at[0])
                [n * g.images.from[0] + c * g.images.from[1] + row * g.images.from[2] + column * g.images.from[3]];
            Pack y;
#pragma unroll
            for (int e = 0; e < PACK; ++e) y.of[e] = narrow(widen(x.of[e]) * gates[lane * PACK + e]);
            ((Pack*)operands.at[second + 2])[n * g.images.to[0] + c * g.images.to[1] + row * g.images.to[2] + column * g.images.to[3]] = y;
        }
        __syncthreads();  // the next gates must not overwrite gates that another thread still reads
    }
}
#endif
