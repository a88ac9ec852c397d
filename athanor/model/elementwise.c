/* What happens between the matrix products of a training step on a CPU, one pass over memory for each function.

   Called through ctypes by athanor/model/elementwise.py, where each function has a twin in torch's operations and
   the shapes are said. The file includes itself once for each format of what comes out of a product: fp32, fp32 that
   is rounded to bf16, and bf16. Sums are fp32 in a fixed order; NaN and infinities go through. */
#ifndef STORED

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define N restrict
typedef int64_t I;

static inline float bits_to_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline uint16_t narrow(float x) {  /* to the nearest, ties to even */
    uint32_t bits = float_to_bits(x);
    uint32_t up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up;
}
static inline float widen(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

/* e^x for x <= 88 to 2 units in the last place: 2^n times a polynomial of what is left (Cephes). Without a branch, or no
   compiler would work on several at once. */
static inline float exponential(float x) {
    float t = x * 1.44269504f;
    int32_t n = (int32_t)(t + __builtin_copysignf(0.5f, t));
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r + 1.0f) * bits_to_float(((uint32_t)n + 127) << 23);
    return bits_to_float(float_to_bits(p) & -(uint32_t)!(x < -87.0f));
}
/* The largest of x, in lanes: a plain loop would have to care about the order of NaN. */
static inline float largest(I count, const float *x) {
    float lanes[16], max = -__builtin_inff();
    for (I j = 0; j < 16; j++) lanes[j] = max;
    for (; count >= 16; count -= 16, x += 16)
        for (I j = 0; j < 16; j++) lanes[j] = x[j] > lanes[j] ? x[j] : lanes[j];
    for (I j = 0; j < count; j++) lanes[j] = x[j] > lanes[j] ? x[j] : lanes[j];
    for (I j = 0; j < 16; j++) max = lanes[j] > max ? lanes[j] : max;
    return max;
}
/* x becomes e^(x - the largest); returns their sum. */
static inline float exponentials(I count, float *x, float max) {
    float sum = 0;
    for (I i = 0; i < count; i++) sum += x[i] = exponential(x[i] - max);
    return sum;
}
static inline float sigmoid(float x) {
    float e = exponential(-__builtin_fabsf(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

#define STORED float
#define NAME(name) name##_fp32
#define GET(x) (x)
#define PUT(x) (x)
#include "elementwise.c"
#undef NAME
#undef PUT
#define NAME(name) name##_rounded
#define PUT(x) widen(narrow(x))
#include "elementwise.c"
#undef STORED
#undef NAME
#undef GET
#undef PUT
#define STORED uint16_t
#define NAME(name) name##_bf16
#define GET(x) widen(x)
#define PUT(x) narrow(x)
#include "elementwise.c"

#else

void NAME(norm)(I rows, I D, const float *N x, const float *N gain, float eps, STORED *N h, float *N inverse) {
    for (I row = 0; row < rows; row++, x += D, h += D) {
        float sum = 0;
        for (I i = 0; i < D; i++) sum += x[i] * x[i];
        float by = inverse[row] = 1.0f / __builtin_sqrtf(sum / D + eps);
        for (I i = 0; i < D; i++) h[i] = PUT(x[i] * by * gain[i]);
    }
}

void NAME(norm_backward)(I rows, I D, const STORED *N dh, const float *N x, const float *N inverse,
                         const float *N gain, const float *N dy, float *N dx, float *N dgain) {
    for (I row = 0; row < rows; row++, dh += D, x += D, dy += D, dx += D) {
        float by = inverse[row], radial = 0;
        for (I i = 0; i < D; i++) {
            float d = GET(dh[i]) * x[i] * by;
            dgain[i] += d;
            radial += d * gain[i];
        }
        radial *= by / D;
        for (I i = 0; i < D; i++) dx[i] = dy[i] + by * (GET(dh[i]) * gain[i] - radial * x[i]);
    }
}

void NAME(add)(I count, const float *N x, const STORED *N y, float *N sum) {
    for (I i = 0; i < count; i++) sum[i] = x[i] + GET(y[i]);
}

void NAME(swiglu)(I rows, I F, const STORED *N both, STORED *N hidden) {
    for (I row = 0; row < rows; row++, both += 2 * F, hidden += F)
        for (I i = 0; i < F; i++) {
            float g = GET(both[i]);
            hidden[i] = PUT(g * sigmoid(g) * GET(both[F + i]));
        }
}

void NAME(swiglu_backward)(I rows, I F, const STORED *N both, const STORED *N dhidden, STORED *N dboth,
                           STORED *N hidden) {
    for (I row = 0; row < rows; row++, both += 2 * F, dboth += 2 * F, dhidden += F, hidden += F)
        for (I i = 0; i < F; i++) {
            float g = GET(both[i]), u = GET(both[F + i]), d = GET(dhidden[i]), s = sigmoid(g);
            hidden[i] = PUT(g * s * u);
            dboth[i] = PUT(d * u * s * (1 + g * (1 - s)));
            dboth[F + i] = PUT(d * g * s);
        }
}

/* Where head `head` of token t lies: queries [B·K, blocks, G·n, E], the others [B·K, T, E]. */
#define PLACE(head, t) ((head) < H \
    ? ((((b * K + (head) / (H / K)) * (T / n) + (t) / n) * (H / K) + (head) % (H / K)) * n + (t) % n) * 2 * E \
    : ((b * K + ((head) - H) % K) * T + (t)) * 2 * E)

/* E is half the width of a head here: element i turns with i + E. `gains` is [2, 2E] or null. */
void NAME(heads)(I B, I T, I H, I K, I E, I n, const STORED *N projected, const float *N gains,
                 const float *N table, float eps, STORED *N q, STORED *N k, STORED *N v, float *N inverse) {
    const float scale = 1.0f / __builtin_sqrtf(2 * E);
    float scaled[2 * E];
    for (I b = 0; b < B; b++)
        for (I t = 0; t < T; t++)
            for (I head = 0; head < H + 2 * K; head++, projected += 2 * E) {
                STORED *to = (head < H ? q : head < H + K ? k : v) + PLACE(head, t);
                if (head >= H + K) {
                    memcpy(to, projected, 2 * E * sizeof(STORED));
                    continue;
                }
                float by = 1;
                const float *gain = 0, *cosine = table + t * 2 * E, *sine = cosine + E;
                if (gains) {
                    float sum = 0;
                    for (I i = 0; i < 2 * E; i++) sum += GET(projected[i]) * GET(projected[i]);
                    by = *inverse++ = 1.0f / __builtin_sqrtf(sum / (2 * E) + eps);
                    gain = gains + (head < H ? 0 : 2 * E);
                }
                if (head < H) by *= scale;
                for (I i = 0; i < 2 * E; i++) scaled[i] = GET(projected[i]) * by;
                if (gain) for (I i = 0; i < 2 * E; i++) scaled[i] *= gain[i];
                for (I i = 0; i < E; i++) {
                    to[i] = PUT(scaled[i] * cosine[i] - scaled[E + i] * sine[i]);
                    to[E + i] = PUT(scaled[E + i] * cosine[i] + scaled[i] * sine[i]);
                }
            }
}

void NAME(heads_backward)(I B, I T, I H, I K, I E, I n, const STORED *N dq, const STORED *N dk, const STORED *N dv,
                          const STORED *N projected, const float *N gains, const float *N table,
                          const float *N inverse, STORED *N dprojected, float *N dgains) {
    const float scale = 1.0f / __builtin_sqrtf(2 * E);
    float turned[2 * E];
    for (I b = 0; b < B; b++)
        for (I t = 0; t < T; t++)
            for (I head = 0; head < H + 2 * K; head++, projected += 2 * E, dprojected += 2 * E) {
                const STORED *from = (head < H ? dq : head < H + K ? dk : dv) + PLACE(head, t);
                if (head >= H + K) {
                    memcpy(dprojected, from, 2 * E * sizeof(STORED));
                    continue;
                }
                const float *cosine = table + t * 2 * E, *sine = cosine + E;
                float by = head < H ? scale : 1;
                for (I i = 0; i < E; i++) {
                    float first = GET(from[i]) * by, second = GET(from[E + i]) * by;
                    turned[i] = first * cosine[i] + second * sine[i];
                    turned[E + i] = second * cosine[i] - first * sine[i];
                }
                if (!gains) {
                    for (I i = 0; i < 2 * E; i++) dprojected[i] = PUT(turned[i]);
                    continue;
                }
                const float *gain = gains + (head < H ? 0 : 2 * E);
                float *dgain = dgains + (head < H ? 0 : 2 * E), radial = 0;
                by = *inverse++;
                for (I i = 0; i < 2 * E; i++) {
                    float d = turned[i] * GET(projected[i]) * by;
                    dgain[i] += d;
                    radial += d * gain[i];
                }
                radial *= by / (2 * E);
                for (I i = 0; i < 2 * E; i++)
                    dprojected[i] = PUT(by * (turned[i] * gain[i] - radial * GET(projected[i])));
            }
}

/* Scores [B, M, n, S] of n queries, the last of which sees all S keys; `bias` [B, T, T], of which these queries' rows
   begin at `start`, or null: every query sees itself and what is before it. */
void NAME(softmax)(I B, I M, I n, I S, I start, I T, STORED *N scores, const STORED *N bias) {
    float e[S];
    for (I row = 0; row < B * M * n; row++, scores += S) {
        I query = start + row % n, seen = query + 1;
        const STORED *add = bias ? bias + (row / (M * n) * T + query) * T : 0;
        for (I i = 0; i < seen; i++) e[i] = GET(scores[i]);
        if (add) for (I i = 0; i < seen; i++) e[i] += GET(add[i]);
        float by = 1 / exponentials(seen, e, largest(seen, e));
        for (I i = 0; i < seen; i++) scores[i] = PUT(e[i] * by);
        memset(scores + seen, 0, (S - seen) * sizeof(STORED));
    }
}

void NAME(softmax_backward)(I B, I M, I n, I S, I start, const STORED *N p, STORED *N dp) {
    for (I row = 0; row < B * M * n; row++, p += S, dp += S) {
        I seen = start + row % n + 1;
        float sum = 0;
        for (I i = 0; i < seen; i++) sum += GET(p[i]) * GET(dp[i]);
        for (I i = 0; i < seen; i++) dp[i] = PUT(GET(p[i]) * (GET(dp[i]) - sum));
        memset(dp + seen, 0, (S - seen) * sizeof(STORED));
    }
}

/* Logits [rows, V] become the gradient of `scale` times the sum of `losses`. */
void NAME(cross_entropy)(I rows, I V, STORED *N logits, const I *N target, float z_loss, float scale,
                         float *N losses) {
    float *e = malloc(V * sizeof(float));
    for (I row = 0; row < rows; row++, logits += V) {
        for (I i = 0; i < V; i++) e[i] = GET(logits[i]);
        float max = largest(V, e), wanted = e[target[row]], sum = exponentials(V, e, max);
        float normaliser = max + (float)__builtin_log(sum), by = scale * (1 + 2 * z_loss * normaliser) / sum;
        losses[row] = normaliser - wanted + z_loss * normaliser * normaliser;
        for (I i = 0; i < V; i++) logits[i] = PUT(e[i] * by);
        logits[target[row]] = PUT(e[target[row]] * by - scale);
    }
    free(e);
}

#endif
