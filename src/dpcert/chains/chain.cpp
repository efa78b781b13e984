// Forward pass and per-example gradients of one chain of layers. `layers.py` writes the list LAYERS for a model.
//
// Guarantee: every number is computed from one row (activations) or from one example (gradients) alone. Each is a sum in a
// fixed order, so its bits depend neither on other rows nor on the width of a vector. Never compile this with -ffast-math.
//
// The images of a row are stored as lines of pixels of channels, with zeros around them where a convolution pads its input.
// A linear layer is a convolution whose kernel covers the whole image. Vectors run over channels; the last vector of a pixel
// may read beyond it, into numbers that are not used.
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int V = 16, REGISTERS = 28;
#else
constexpr int V = 8, REGISTERS = 12;
#endif
constexpr int GROUP = 4, BLOCK = 512;  // rows of a forward pass, columns of a sum at a time
typedef float Vector __attribute__((vector_size(V * 4)));
typedef float Unaligned __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(V * 4)));
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
typedef double Wide __attribute__((vector_size(128)));
#define INLINE static inline __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 64") for (int i = 0; i < (n); i++)

enum Kind { CONVOLUTION, MAX, AVERAGE, TANH, RELU };
struct Layer { Kind kind; int h, w, c, oh, ow, o, kh, kw, sh, sw, ph, pw; bool bias, trains_weight, trains_bias; };
constexpr Layer layers[] = {LAYERS};
constexpr int N = sizeof(layers) / sizeof(Layer);

// Image i is the input of layer i; image N holds the logits. An activation overwrites its input where nobody else needs it.
constexpr int up(int n, int of) { return (n + of - 1) / of * of; }
constexpr bool elementwise(int i) { return layers[i].kind == TANH || layers[i].kind == RELU; }
constexpr bool in_place(int i) { return i < N && elementwise(i) && (i == 0 || !elementwise(i - 1)); }
constexpr bool convolves(int i) { return layers[i].kind == CONVOLUTION; }
constexpr int pad_h(int i) { return i == N ? 0 : convolves(i) ? layers[i].ph : in_place(i) ? pad_h(i + 1) : 0; }
constexpr int pad_w(int i) { return i == N ? 0 : convolves(i) ? layers[i].pw : in_place(i) ? pad_w(i + 1) : 0; }
constexpr int height(int i) { return i < N ? layers[i].h : layers[N - 1].oh; }
constexpr int width(int i) { return i < N ? layers[i].w : layers[N - 1].ow; }
constexpr int channels(int i) { return i < N ? layers[i].c : layers[N - 1].o; }
constexpr int line(int i) { return (width(i) + 2 * pad_w(i)) * channels(i); }  // floats from a line to the next
constexpr int volume(int i) { return up((height(i) + 2 * pad_h(i)) * line(i) + V, 16); }
constexpr int image(int i) { return i == 0 ? 0 : image(i - 1) + (in_place(i - 1) ? 0 : volume(i - 1)); }
constexpr int inside(int i) { return image(i) + pad_h(i) * line(i) + pad_w(i) * channels(i); }
constexpr int ROW = image(N) + volume(N);

// The kernel of a convolution: `run` of its taps are neighbors in memory. Weights are stored twice, for both directions.
constexpr int run(int i) { return layers[i].kw * layers[i].c; }
constexpr int taps(int i) { return layers[i].kh * run(i); }
constexpr int across(int i) { return up(layers[i].o, V); }
constexpr int ahead(int i) { return convolves(i) ? (taps(i) + 1) * across(i) : 0; }
constexpr int back(int i) { return convolves(i) ? layers[i].kh * layers[i].o * up(run(i), V) : 0; }
constexpr int weights_at(int i) { return i == 0 ? 0 : weights_at(i - 1) + ahead(i - 1) + back(i - 1); }
constexpr int trained(int i) { return (layers[i].trains_weight * taps(i) + layers[i].trains_bias) * layers[i].o; }
constexpr int gradient_at(int i) { return i == 0 ? 0 : gradient_at(i - 1) + trained(i - 1); }
constexpr int first_trained(int i = 0) { return i == N || trained(i) ? i : first_trained(i + 1); }
constexpr int SIZE = gradient_at(N);

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int divisor(int n, int most) { return most < 2 ? 1 : n % most ? divisor(n, most - 1) : most; }
constexpr int equal(int n, int most) { return up(n, up(n, most) / most) / (up(n, most) / most); }  // size of about equal blocks

INLINE Vector load(const float* from) { return *(const Unaligned*)from; }
INLINE void store(float* to, Vector value, int lanes) {
    if (lanes >= V) *(Unaligned*)to = value;
    else std::memcpy(to, &value, 4 * lanes);
}
template <int SIZE> struct Constant { static constexpr int value = SIZE; };
// Calls body(start, Constant<size>) for blocks of `MOST` and a rest.
template <int TOTAL, int MOST, class Body> INLINE void blocks(Body body) {
    for (int start = 0; start + MOST <= TOTAL; start += MOST) body(start, Constant<MOST>());
    if constexpr (TOTAL % MOST) body(TOTAL - TOTAL % MOST, Constant<TOTAL % MOST>());
}

// tanh(x) = e / (e + 2), where e = exp(2 x) - 1 = 2^n (exp(r) - 1) + 2^n - 1 with |r| <= log(2) / 2.
INLINE Vector hyperbolic_tangent(Vector x) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 2^23: its last bit is 1
    x = x + x;
    x = x > 20.0f ? Vector{} + 20.0f : x;
    x = x < -20.0f ? Vector{} - 20.0f : x;
    Vector n = x * 1.44269504f + TO_INTEGER;
    Integers exponent;
    std::memcpy(&exponent, &n, sizeof n);
    exponent = (exponent << 23) + 0x3f800000;
    n = n - TO_INTEGER;
    Vector r = x - n * 0.693359375f, scale, p;
    r = r + n * 2.12194440e-4f;
    p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r;
    p = p * r + r;
    std::memcpy(&scale, &exponent, sizeof scale);
    p = p * scale + (scale - 1.0f);
    return p / (p + 2.0f);
}

// Outputs at positions that are `step` apart: of one line, or of the rows of a group if each has one position.
template <int I, int POSITIONS> INLINE void convolve(const float* in, int step, float* out, int step_out, const float* weights) {
    static constexpr Layer A = layers[I];
    blocks<across(I) / V, least(2, across(I) / V)>([&](int o, auto wide) LAMBDA {
        constexpr int O = decltype(wide)::value;
        blocks<POSITIONS, equal(POSITIONS, REGISTERS / O - 1)>([&](int first, auto several) LAMBDA {
            constexpr int P = decltype(several)::value;
            Vector sums[P][O];
            EACH(p, P) EACH(j, O) sums[p][j] = load(weights + taps(I) * across(I) + (o + j) * V);
            for (int i = 0; i < A.kh; i++) {
                const float *x = in + first * step + i * line(I), *w = weights + i * run(I) * across(I) + o * V;
                for (int l = 0; l < run(I); l++, w += across(I)) {
                    Vector column[O];
                    EACH(j, O) column[j] = load(w + j * V);
                    EACH(p, P) EACH(j, O) sums[p][j] += x[p * step + l] * column[j];
                }
            }
            EACH(p, P) EACH(j, O) store(out + (first + p) * step_out + (o + j) * V, sums[p][j], A.o - (o + j) * V);
        });
    });
}

template <int I> INLINE Vector pooled(const float* x) {
    static constexpr Layer A = layers[I];
    Vector result = load(x);
    EACH(t, A.kh * A.kw) if (t > 0) {
        Vector other = load(x + t / A.kw * line(I) + t % A.kw * A.c);
        if constexpr (A.kind == AVERAGE) result += other;
        else result = other > result || other != other ? other : result;
    }
    return A.kind == AVERAGE ? result / (float)(A.kh * A.kw) : result;
}

template <int I> static void forward_from(float* rows, const float* weights) {
    if constexpr (I < N) {
        static constexpr Layer A = layers[I];
        if constexpr (convolves(I) && A.oh * A.ow == 1)
            convolve<I, GROUP>(rows + image(I), ROW, rows + inside(I + 1), ROW, weights + weights_at(I));
        else for (float* row = rows; row < rows + GROUP * ROW; row += ROW) {
            if constexpr (elementwise(I)) for (int k = 0; k < volume(I); k += V) {
                Vector x = load(row + image(I) + k);
                store(row + image(I + 1) + k, A.kind == TANH ? hyperbolic_tangent(x) : x < 0.0f ? Vector{} : x, V);
            } else for (int i = 0; i < A.oh; i++) {
                float* out = row + inside(I + 1) + i * line(I + 1);
                const float* in = row + (convolves(I) ? image(I) : inside(I)) + i * A.sh * line(I);
                if constexpr (convolves(I)) convolve<I, A.ow>(in, A.sw * A.c, out, A.o, weights + weights_at(I));
                else for (int j = 0; j < A.ow; j++) for (int c = 0; c < A.c; c += V)
                    store(out + j * A.c + c, pooled<I>(in + j * A.sw * A.c + c), A.c - c);
            }
        }
        forward_from<I + 1>(rows, weights);
    }
}

// Adds the transposed convolution of `delta` to `into`. Every number gets its terms in the order of the positions: the taps are
// taken from the last to the first, because a later position reaches the same number with an earlier tap.
template <int I> INLINE void convolve_back(const float* delta, float* into, const float* weights) {
    static constexpr Layer A = layers[I];
    constexpr int VECTORS = up(run(I), V) / V, MOST = equal(A.ow, 6);
    for (int r = 0; r < A.oh; r++) for (int i = 0; i < A.kh; i++)
        blocks<VECTORS, equal(VECTORS, least(8, REGISTERS / MOST))>([&](int before, auto wide) LAMBDA {
            constexpr int L = decltype(wide)::value;
            const int l = VECTORS - before - L;
            blocks<A.ow, MOST>([&](int q, auto several) LAMBDA {
                constexpr int P = decltype(several)::value;
                Vector sums[P][L] = {};
                const float *d = delta + r * line(I + 1) + q * A.o, *w = weights + (i * A.o * VECTORS + l) * V;
                for (int o = 0; o < A.o; o++, w += VECTORS * V) EACH(p, P) EACH(j, L) sums[p][j] += d[p * A.o + o] * load(w + j * V);
                float* x = into + (r * A.sh + i) * line(I) + q * A.sw * A.c + l * V;
                EACH(p, P) EACH(j, L) {
                    float* to = x + p * A.sw * A.c + j * V;
                    store(to, load(to) + sums[p][j], V);
                }
            });
        });
}

template <int I> INLINE void pool_back(const float* x, const float* delta, float* into) {
    static constexpr Layer A = layers[I];
    for (int r = 0; r < A.oh; r++) for (int q = 0; q < A.ow; q++) for (int c = 0; c < A.c; c += V) {
        int corner = r * A.sh * line(I) + q * A.sw * A.c + c;
        Vector best = pooled<I>(x + corner), d = load(delta + r * line(I + 1) + q * A.c + c);
        if constexpr (A.kind == AVERAGE) d = d / (float)(A.kh * A.kw);
        EACH(t, A.kh * A.kw) {  // the first of equal values gets the gradient, as in PyTorch
            int at = corner + t / A.kw * line(I) + t % A.kw * A.c;
            Vector seen = load(x + at), now = load(into + at);
            Integers chosen = seen == best || seen != seen;
            store(into + at, A.kind == AVERAGE ? now + d : chosen ? now + d : now, A.c - c);
            if constexpr (A.kind == MAX) d = chosen ? Vector{} : d;
        }
    }
}

// The gradients of all images of one row from that of the logits, down to the output of the first trained layer.
template <int I> static void backward_from(const float* row, float* delta, const float* weights) {
    if constexpr (I > first_trained()) {
        static constexpr Layer A = layers[I];
        float* into = delta + image(I);
        if constexpr (elementwise(I)) for (int k = 0; k < volume(I); k += V) {
            Vector y = load(row + image(I + 1) + k), d = load(delta + image(I + 1) + k);
            store(into + k, A.kind == TANH ? d - d * (y * y) : y > 0.0f || y != y ? d : Vector{}, V);
        } else {
            std::memset(into, 0, sizeof(float) * volume(I));
            if constexpr (convolves(I)) convolve_back<I>(delta + inside(I + 1), into, weights + weights_at(I) + ahead(I));
            else pool_back<I>(row + inside(I), delta + inside(I + 1), delta + inside(I));
        }
        backward_from<I - 1>(row, delta, weights);
    }
}

// The gradients of the weights of all layers for one example: sums over its views and positions, each written once.
template <int I> static void gradient_from(const float* rows, const float* delta, int views, float* gradient) {
    if constexpr (I < N) {
        static constexpr Layer A = layers[I];
        constexpr int WIDE = A.o > V ? 2 : 1, LONG = divisor(run(I), least(run(I), REGISTERS / WIDE - 2));
        constexpr int HIGH = divisor(A.kh, least(A.kh, (REGISTERS / WIDE - 2) / LONG));
        float* to = gradient + gradient_at(I);
        if constexpr (A.trains_weight) blocks<across(I) / V, WIDE>([&](int o, auto wide) LAMBDA {
            constexpr int O = decltype(wide)::value;
            for (int i = 0; i < A.kh; i += HIGH) for (int l = 0; l < run(I); l += LONG) {
                Vector sums[HIGH][LONG][O] = {};
                for (int v = 0; v < views; v++) for (int r = 0; r < A.oh; r++) {
                    const float* x = rows + v * ROW + image(I) + (r * A.sh + i) * line(I) + l;
                    const float* d = delta + v * ROW + inside(I + 1) + r * line(I + 1) + o * V;
                    for (int q = 0; q < A.ow; q++, x += A.sw * A.c, d += A.o) {
                        Vector here[O];
                        EACH(j, O) here[j] = load(d + j * V);
                        EACH(a, HIGH) EACH(b, LONG) EACH(j, O) sums[a][b][j] += x[a * line(I) + b] * here[j];
                    }
                }
                EACH(a, HIGH) EACH(b, LONG) EACH(j, O)
                    store(to + ((i + a) * run(I) + l + b) * A.o + (o + j) * V, sums[a][b][j], A.o - (o + j) * V);
            }
        });
        if constexpr (A.trains_bias) for (int o = 0; o < A.o; o += V) {
            Vector sum = {};
            for (int v = 0; v < views; v++) for (int r = 0; r < A.oh; r++) for (int q = 0; q < A.ow; q++)
                sum += load(delta + v * ROW + inside(I + 1) + r * line(I + 1) + q * A.o + o);
            store(to + A.trains_weight * taps(I) * A.o + o, sum, A.o - o);
        }
        gradient_from<I + 1>(rows, delta, views, gradient);
    }
}

template <int I> static void pack_from(const float* const* parameters, float* weights) {
    if constexpr (I < N) {
        static constexpr Layer A = layers[I];
        if constexpr (convolves(I)) {
            const float *from = *parameters++, *bias = A.bias ? *parameters++ : nullptr;
            float *forth = weights + weights_at(I), *against = forth + ahead(I);
            for (int o = 0; o < A.o; o++) {
                for (int c = 0; c < A.c; c++) for (int i = 0; i < A.kh; i++) for (int j = 0; j < A.kw; j++, from++) {
                    forth[(i * run(I) + j * A.c + c) * across(I) + o] = *from;
                    against[(i * A.o + o) * up(run(I), V) + j * A.c + c] = *from;
                }
                forth[taps(I) * across(I) + o] = bias ? bias[o] : 0.0f;
            }
        }
        pack_from<I + 1>(parameters, weights);
    }
}

extern "C" {
void sizes(int64_t* to) {
    to[0] = ROW, to[1] = weights_at(N), to[2] = SIZE, to[3] = GROUP;
}

// Rearranges the parameters, each convolution's weight and bias in turn, for the functions below; `weights` begins as zeros.
void pack(const float* const* parameters, float* weights) { pack_from<0>(parameters, weights); }

// Logits of rows ``[rows, c, h, w]`` (or ``[rows, h, w, c]`` if `last`) with `shift` added to each. Keeps all images of every
// row in `work`, or of a group at a time unless `keep`. `work` has zeros at first and place for whole groups.
void forward(const float* in, const float* shift, int64_t last, const float* weights, int64_t rows, int64_t keep, float* work, float* logits) {
    constexpr Layer A = layers[0];
    constexpr int PIXELS = A.h * A.w, LINE = A.w * A.c;
    static const float NOTHING[PIXELS * A.c] = {};
    if (!shift) shift = NOTHING;
    for (int64_t first = 0; first < rows; first += GROUP) {
        float* group = work + keep * first * ROW;
        int count = rows - first < GROUP ? (int)(rows - first) : GROUP;
        for (int g = 0; g < count; g++) for (int i = 0; i < A.h; i++) {
            const float* x = in + (first + g) * PIXELS * A.c;
            float* to = group + g * ROW + inside(0) + i * line(0);
            if (last || A.c == 1) for (int k = 0; k < LINE; k++) to[k] = x[i * LINE + k] + shift[i * LINE + k];
            else for (int j = 0; j < A.w; j++) for (int c = 0; c < A.c; c++) {
                int at = c * PIXELS + i * A.w + j;
                to[j * A.c + c] = x[at] + shift[at];
            }
        }
        forward_from<0>(group, weights);
        for (int g = 0; g < count; g++) std::memcpy(logits + (first + g) * channels(N), group + g * ROW + inside(N), 4 * channels(N));
    }
}

// Gradients ``[examples, SIZE]`` and their squared norms in float64, from the work of `forward` and the gradients of the logits.
void backward(const float* work, const float* weights, int64_t examples, int64_t views, const float* slopes, float* delta,
              float* gradients, double* squares) {
    for (int64_t example = 0; example < examples; example++) {
        const float* rows = work + example * views * ROW;
        float* gradient = gradients + example * SIZE;
        for (int64_t v = 0; v < views; v++) {
            std::memcpy(delta + v * ROW + inside(N), slopes + (example * views + v) * channels(N), 4 * channels(N));
            backward_from<N - 1>(rows + v * ROW, delta + v * ROW, weights);
        }
        gradient_from<0>(rows, delta, (int)views, gradient);
        Wide sums = {};
        for (int k = 0; k + 16 <= SIZE; k += 16) {
            Wide wide = __builtin_convertvector(*(const Sixteen*)(gradient + k), Wide);
            sums += wide * wide;
        }
        double sum = 0.0;
        for (int k = SIZE / 16 * 16; k < SIZE; k++) sum += (double)gradient[k] * (double)gradient[k];
        for (int j = 0; j < 16; j++) sum += sums[j];
        squares[example] = sum;
    }
}

// Adds factor times gradient of each example to `total`, in float64; an example with factor 0 is not read: 0 * inf is nan.
void add(const float* gradients, int64_t examples, const double* factors, double* total) {
    for (int start = 0; start < SIZE; start += BLOCK)
        for (int64_t example = 0; example < examples; example++) {
            const float* gradient = gradients + example * SIZE;
            if (factors[example] != 0.0)
                for (int k = start; k < least(start + BLOCK, SIZE); k++) total[k] += factors[example] * (double)gradient[k];
        }
}
}
