// CPU kernels of the executor behind a plain C interface (see executor/native/library.py): no header of any framework,
// so that building takes seconds and binds to no version.
#include <cstdlib>

#include "attention.h"
#include "experts.h"
#include "gemm.h"
#include "pointwise.h"

extern "C" {

int ct_lanes() { return LANES; }
int ct_queries() { return QUERIES; }
void ct_set_threads(int threads) { ThreadPool::shared().resize(threads); }

long ct_packed_panels(long n, int gated) { return gated ? (n / 2 + LANES - 1) / LANES : (n + PANEL - 1) / PANEL; }

void ct_pack(const void* w, long ldw, long n, long k, int gated, int half, void* out) {
    if (half) pack(static_cast<const uint16_t*>(w), ldw, n, k, gated, static_cast<uint16_t*>(out));
    else pack(static_cast<const float*>(w), ldw, n, k, gated, static_cast<float*>(out));
}

void ct_gemm(const float* a, long lda, long m, const void* packed, int half, long k, long first, long last, const float* bias,
             float* c, long ldc, long columns, int epilogue) {
    const Output out{bias, c, ldc, columns, epilogue};
    if (half) gemm(a, lda, m, static_cast<const uint32_t*>(packed), k, first, last, out);
    else gemm(a, lda, m, static_cast<const float*>(packed), k, first, last, out);
}

void ct_experts(const ExpertLayer* layer) {
    if (layer->half) run_experts<uint32_t>(*layer);
    else run_experts<float>(*layer);
}

void ct_rms_norm(const float* x, long ldx, const float* weight, float eps, long rows, long n, float* out) {
    parallel_rows(rows, 32, [&](long first, long last) {
        for (long row = first; row < last; ++row) rms_norm_row(x + row * ldx, weight, eps, n, out + row * n);
    });
}

void ct_embed(const int64_t* ids, long rows, const void* table, int half, long n, float* out) {
    parallel_rows(rows, 64, [&](long first, long last) {
        for (long row = first; row < last; ++row) {
            if (half) widen_row(static_cast<const uint16_t*>(table) + ids[row] * n, n, out + row * n);
            else widen_row(static_cast<const float*>(table) + ids[row] * n, n, out + row * n);
        }
    });
}

void ct_rotate_and_store(const Rotation* r, int half) {
    if (half) rotate_and_store<uint16_t>(*r);
    else rotate_and_store<float>(*r);
}

void ct_attend(const Work* w, int half) {
    if (half) attend<uint16_t>(*w);
    else attend<float>(*w);
}

void ct_argmax(const float* logits, long ld, long rows, long n, int64_t* out) {
    parallel_rows(rows, 4, [&](long first, long last) {
        for (long row = first; row < last; ++row) out[row] = argmax_row(logits + row * ld, n);
    });
}
}
