// The kernels of this package. Each compilation makes one variant of one kernel. `kernels.py` writes the macros that select the
// variant, and the geometry.
//
// All kernels take two arguments by value. The first has the operands' addresses, inputs before the output. The second is a
// geometry. All members of a geometry have the same integer type, so that Python can write it as an array. No header is needed.
// Every operand begins at a multiple of 16 bytes. A thread reads and writes PACK elements at a time. Strides, and extents of the
// innermost axis, are then counted in packs.

struct alignas(PACK * sizeof(ELEMENT)) Pack {
    ELEMENT of[PACK];
};

#if HALF
HELPER float widen(ELEMENT x) { return half_to_float(x); }
HELPER ELEMENT narrow(float x) { return float_to_half(x); }
#elif BFLOAT
HELPER float widen(ELEMENT x) { return bfloat_to_float(x); }
HELPER ELEMENT narrow(float x) { return float_to_bfloat(x); }
#else
HELPER float widen(ELEMENT x) { return x; }
HELPER ELEMENT narrow(float x) { return (ELEMENT)x; }
#endif

#if ADD || DEPTHWISE || AFFINE || LAYER || EXCITE
HELPER float activated(float x) {
#if RELU
    return x < 0 ? 0 : x;  // NaN stays
#elif SIGMOID
    return 1 / (1 + expf(-x));
#elif TANH
    return tanhf(x);
#elif GELU
    return x * normcdff(x);
#elif SWISH
    return x / (1 + expf(-x));
#elif HARDSIGMOID
    return x <= -3 ? 0 : x >= 3 ? 1 : (x + 3) / 6;  // NaN stays
#elif HARDSWISH
    return x * (x <= -3 ? 0 : x >= 3 ? 1 : (x + 3) / 6);
#else
    return x;
#endif
}
#endif

#if ADD || CONCAT
// Turns the number of an element into its indices along the axes. The innermost axis is the first.
HELPER void unravel(count_t number, const offset_t* extents, offset_t* places) {
#pragma unroll
    for (int axis = 0; axis < RANK - 1; ++axis) {
        places[axis] = number % (count_t)extents[axis];
        number /= (count_t)extents[axis];
    }
    places[RANK - 1] = number;
}

HELPER offset_t offset_of(const offset_t* places, const offset_t* steps) {
    offset_t offset = 0;
#pragma unroll
    for (int axis = 0; axis < RANK; ++axis) offset += places[axis] * steps[axis];
    return offset;
}
#endif

#if ADD
struct Sum {
    offset_t inputs, count, tail;  // packs, and elements behind the last one, where there is one axis without gaps
    offset_t extents[RANK], steps[OPERANDS][RANK];
};

ENTRY void add(BY_VALUE Pointers operands, BY_VALUE Sum sum) {
    constexpr int unrolled = EXACT ? OPERANDS - 1 : 4;
    const int inputs = EXACT ? OPERANDS - 1 : sum.inputs;
    FOR_EACH_INDEX(i, sum.count) {
        offset_t places[RANK];
        unravel(i, sum.extents, places);
        // The sum of no inputs is 0.
        float total[PACK] = {};
#pragma unroll unrolled
        for (int k = 0; k < inputs; ++k) {
            const Pack x = ((const Pack*)operands.at[k])[offset_of(places, sum.steps[k])];
#pragma unroll
            for (int e = 0; e < PACK; ++e) total[e] = k ? total[e] + widen(x.of[e]) : widen(x.of[e]);
        }
        Pack y;
#pragma unroll
        for (int e = 0; e < PACK; ++e) y.of[e] = narrow(activated(total[e]));
        ((Pack*)operands.at[inputs])[offset_of(places, sum.steps[inputs])] = y;
    }
    FOR_EACH_INDEX(i, sum.tail) {
        const offset_t place = sum.count * PACK + i;
        float total = inputs ? widen(((const ELEMENT*)operands.at[0])[place]) : 0;
        for (int k = 1; k < inputs; ++k) total += widen(((const ELEMENT*)operands.at[k])[place]);
        ((ELEMENT*)operands.at[inputs])[place] = narrow(activated(total));
    }
}
#endif

#if CONCAT
struct Part {  // of the output, which one input is copied to
    offset_t count, start, extents[RANK], from[RANK], to[RANK];
};

struct Parts {
    offset_t inputs;
    Part of[OPERANDS - 1];
};

ENTRY void concat(BY_VALUE Pointers operands, BY_VALUE Parts parts) {
    const Part& part = parts.of[blockIdx.y];
    const Pack* x = (const Pack*)operands.at[blockIdx.y];
    Pack* y = (Pack*)operands.at[parts.inputs] + part.start;
    if (x == y) return;  // it lies in its place: whoever made it wrote it there
    FOR_EACH_INDEX(i, part.count) {
        offset_t places[RANK];
        unravel(i, part.extents, places);
        y[offset_of(places, part.to)] = x[offset_of(places, part.from)];
    }
}
#endif

#if WINDOWS || WHOLE || DEPTHWISE
#if MAXIMUM
#define NOTHING (-__int_as_float(0x7f800000))
HELPER float joined(float a, float b) { return b > a || b != b ? b : a; }  // NaN is the largest
#else
#define NOTHING 0.0f
HELPER float joined(float a, float b) { return a + b; }
#endif
struct Images {  // steps from image to image, channel to channel, row to row and column to column
    offset_t channels, height, width, from[4], to[4];  // channels are packs where they are innermost
};
#endif

#if WINDOWS || DEPTHWISE
// Returns the nearest index inside the image, so that loads need no branches.
HELPER offset_t nearest(offset_t place, offset_t extent) { return place < 0 ? 0 : place < extent ? place : extent - 1; }
#endif

#if WINDOWS
struct Windows {  // each has a pixel of the image, so for a maximum no other one is met
    Images images;
    offset_t count, rows, columns, window[2], stride[2], padding[2], counted;
};

// Returns the length of a window up to the end of the padded image. Only the last window may exceed this end.
HELPER offset_t clipped(offset_t start, offset_t length, offset_t end) { return start + length < end ? length : end - start; }

ENTRY void windows(BY_VALUE Pointers operands, BY_VALUE Windows g) {
    constexpr int across = COLUMNS ? COLUMNS : 4, down = ROWS && ROWS * across * sizeof(Pack) <= 256 ? ROWS : 1;
    const offset_t height = ROWS ? ROWS : g.window[0], width = COLUMNS ? COLUMNS : g.window[1];
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
        const offset_t n = rest, top = p * g.stride[0] - g.padding[0], left = q * g.stride[1] - g.padding[1];
        const Pack* x = (const Pack*)operands.at[0] + (n * g.images.from[0] + c * g.images.from[1]);
        float result[PACK];
#pragma unroll
        for (int e = 0; e < PACK; ++e) result[e] = NOTHING;
        offset_t pixels = 0;
        for (offset_t above = 0; above < height; above += down)
            for (offset_t before = 0; before < width; before += across) {
                Pack seen[down][across];
#pragma unroll
                for (int r = 0; r < down; ++r) {
                    const offset_t row = nearest(top + above + r, g.images.height);
#pragma unroll
                    for (int s = 0; s < across; ++s)
                        seen[r][s] = x[row * g.images.from[2] + nearest(left + before + s, g.images.width) * g.images.from[3]];
                }
                LOADED;
#pragma unroll
                for (int r = 0; r < down; ++r)
#pragma unroll
                    for (int s = 0; s < across; ++s) {
                        const offset_t row = top + above + r, column = left + before + s;
                        const bool counts = COLUMNS || before + s < width;
                        const bool inside = row == nearest(row, g.images.height) && column == nearest(column, g.images.width);
#pragma unroll
                        for (int e = 0; e < PACK; ++e) {
                            const float value = widen(seen[r][s].of[e]);
                            if (counts) result[e] = joined(result[e], MAXIMUM || inside ? value : 0);
                        }
                        pixels += counts && inside;
                    }
            }
        const float area = MAXIMUM ? 1.0f : !g.counted ? (float)pixels
                         : (float)clipped(top, height, g.images.height + g.padding[0])
                             * (float)clipped(left, width, g.images.width + g.padding[1]);
        Pack y;
#pragma unroll
        for (int e = 0; e < PACK; ++e) y.of[e] = narrow(MAXIMUM ? result[e] : result[e] / area);
        Pack* to = (Pack*)operands.at[1] + (n * g.images.to[0] + c * g.images.to[1]);
        to[p * g.images.to[2] + q * g.images.to[3]] = y;
    }
}
#endif

#if WHOLE
struct Whole {
    Images images;
    offset_t outputs;
};

// A block computes LANES outputs. SHARES threads share the pixels of an output. Neighbouring threads read neighbouring memory.
ENTRY void __launch_bounds__(LANES * SHARES) whole(BY_VALUE Pointers operands, BY_VALUE Whole g) {
    __shared__ float parts[SHARES][LANES][PACK];
#if CHANNELS_INNERMOST
    const int lane = threadIdx.x % LANES, share = threadIdx.x / LANES;
#else
    const int lane = threadIdx.x / SHARES, share = threadIdx.x % SHARES;
#endif
    const offset_t pixels = g.images.height * g.images.width;
    for (count_t first = (count_t)blockIdx.x * LANES; first < (count_t)g.outputs; first += (count_t)gridDim.x * LANES) {
        const count_t output = first + lane;
        const offset_t n = output / (count_t)g.images.channels, c = output % (count_t)g.images.channels;
        float result[PACK];
#pragma unroll
        for (int e = 0; e < PACK; ++e) result[e] = NOTHING;
        if (output < (count_t)g.outputs) {
            const Pack* x = (const Pack*)operands.at[0] + (n * g.images.from[0] + c * g.images.from[1]);
            constexpr int at_once = 8;  // a load past the end reads the last pixel, and its value is not used
            for (count_t i = share; i < (count_t)pixels; i += at_once * SHARES) {
                Pack seen[at_once];
#pragma unroll
                for (int k = 0; k < at_once; ++k) {
                    const count_t pixel = i + k * SHARES < (count_t)pixels ? i + k * SHARES : (count_t)pixels - 1;
                    const offset_t row = pixel / (count_t)g.images.width, column = pixel % (count_t)g.images.width;
                    seen[k] = x[row * g.images.from[2] + column * g.images.from[3]];
                }
                LOADED;
#pragma unroll
                for (int k = 0; k < at_once; ++k)
#pragma unroll
                    for (int e = 0; e < PACK; ++e)
                        if (i + k * SHARES < (count_t)pixels) result[e] = joined(result[e], widen(seen[k].of[e]));
            }
        }
#pragma unroll
        for (int e = 0; e < PACK; ++e) parts[share][lane][e] = result[e];
        for (int half = SHARES / 2; half; half /= 2) {
            __syncthreads();
            if (share < half) {
#pragma unroll
                for (int e = 0; e < PACK; ++e)
                    parts[share][lane][e] = joined(parts[share][lane][e], parts[share + half][lane][e]);
            }
        }
        if (share == 0 && output < (count_t)g.outputs) {  // what this thread itself wrote last
            Pack y;
#pragma unroll
            for (int e = 0; e < PACK; ++e) y.of[e] = narrow(MAXIMUM ? parts[0][lane][e] : parts[0][lane][e] / (float)pixels);
            ((Pack*)operands.at[1])[n * g.images.to[0] + c * g.images.to[1]] = y;
        }
        __syncthreads();  // before the next ones overwrite what others still read
    }
}
#endif

#if DEPTHWISE
struct Depthwise {
    Images images;
    offset_t pixels, rows, columns, stride[2], padding[2], dilation[2], lanes, together, bias, filter;  // together: pixels of a block
};

// A block has the filters of some channels, and loops over pixels of all images. Neighbouring threads read neighbouring memory.
ENTRY void depthwise(BY_VALUE Pointers operands, BY_VALUE Depthwise g) {
    // Number of window rows that are loaded at once. More rows would take more registers, and fewer blocks would run at once.
    constexpr int taps = ROWS * COLUMNS, at_once = taps * sizeof(Pack) <= 256 ? ROWS : 1;
    __shared__ float filters[taps][LANES * PACK], biases[LANES * PACK];
    const int lanes = g.lanes, together = g.together;
#if CHANNELS_INNERMOST
    const int lane = threadIdx.x % lanes, place = threadIdx.x / lanes;
#else
    const int lane = threadIdx.x / together, place = threadIdx.x % together;
#endif
    for (offset_t first = (offset_t)blockIdx.y * lanes; first < g.images.channels; first += (offset_t)gridDim.y * lanes) {
        const int packs = g.images.channels - first < lanes ? (int)(g.images.channels - first) : lanes, channels = packs * PACK;
        const count_t pixels = lane < packs ? (count_t)g.pixels : 0, step = (count_t)gridDim.x * together;
        const offset_t c = first + lane;
        offset_t n, p, q;
        Pack seen[at_once][COLUMNS];
        bool inside[at_once][COLUMNS];
        auto load = [&](int above) {
            const Pack* x = (const Pack*)operands.at[0] + (n * g.images.from[0] + c * g.images.from[1]);
            const offset_t top = p * g.stride[0] - g.padding[0], left = q * g.stride[1] - g.padding[1];
#pragma unroll
            for (int r = 0; r < at_once; ++r) {
                const offset_t down = top + (above + r) * g.dilation[0], row = nearest(down, g.images.height);
#pragma unroll
                for (int s = 0; s < COLUMNS; ++s) {
                    const offset_t right = left + s * g.dilation[1], column = nearest(right, g.images.width);
                    inside[r][s] = row == down && column == right;
                    seen[r][s] = x[row * g.images.from[2] + column * g.images.from[3]];
                }
            }
        };
        auto begin = [&](count_t i) {
            q = i % (count_t)g.columns;
            p = i / (count_t)g.columns % (count_t)g.rows;
            n = i / (count_t)g.columns / (count_t)g.rows;
            load(0);
        };
        count_t i = (count_t)blockIdx.x * together + place;
        if (i < pixels) begin(i);  // under way while the filters are
        const ELEMENT* w = (const ELEMENT*)operands.at[1] + first * PACK * g.filter;
        for (int k = threadIdx.x; k < channels; k += blockDim.x) {
            ELEMENT own[taps];
#pragma unroll
            for (int t = 0; t < taps; ++t) own[t] = w[k * g.filter + t];
            biases[k] = BIAS ? widen(((const ELEMENT*)operands.at[2])[(first * PACK + k) * g.bias]) : 0;
#pragma unroll
            for (int t = 0; t < taps; ++t) filters[t][k] = widen(own[t]);
        }
        __syncthreads();
        while (i < pixels) {
            float total[PACK];
#pragma unroll
            for (int e = 0; e < PACK; ++e) total[e] = 0;
#pragma unroll 1
            for (int above = 0; above < ROWS; above += at_once) {
                if (above) load(above);
#pragma unroll
                for (int r = 0; r < at_once; ++r)
#pragma unroll
                    for (int s = 0; s < COLUMNS; ++s)
#pragma unroll
                        for (int e = 0; e < PACK; ++e) {
                            const float value = inside[r][s] ? widen(seen[r][s].of[e]) : 0;
                            total[e] += value * filters[(above + r) * COLUMNS + s][lane * PACK + e];
                        }
            }
            Pack y;
#pragma unroll
            for (int e = 0; e < PACK; ++e) y.of[e] = narrow(activated(total[e] + biases[lane * PACK + e]));
            Pack* to = (Pack*)operands.at[2 + BIAS] + (n * g.images.to[0] + c * g.images.to[1]);
            to[p * g.images.to[2] + q * g.images.to[3]] = y;
            i += step;
            if (i < pixels) begin(i);
        }
        __syncthreads();  // before the next ones overwrite what others still read
    }
}
#endif
