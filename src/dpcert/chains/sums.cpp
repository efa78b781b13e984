// Squared norms and weighted sums of float32 gradients, in float64. The order of all additions is fixed by this file, not by the
// width of a vector or the number of gradients at a time.
#include <cstdint>

namespace {
typedef float Sixteen __attribute__((vector_size(64), aligned(4)));
typedef double Wide __attribute__((vector_size(128)));
const int64_t BLOCK = 2048;  // entries of the total that stay in the cache while gradients are added
}

extern "C" {
double squares(const float* gradient, int64_t size) {
    Wide even = {}, odd = {};
    int64_t k = 0;
    for (; k + 32 <= size; k += 32) {
        Wide first = __builtin_convertvector(*(const Sixteen*)(gradient + k), Wide);
        Wide second = __builtin_convertvector(*(const Sixteen*)(gradient + k + 16), Wide);
        even += first * first;
        odd += second * second;
    }
    double sum = 0.0;
    for (; k < size; k++) sum += (double)gradient[k] * (double)gradient[k];
    even += odd;
    for (int j = 0; j < 16; j++) sum += even[j];
    return sum;
}

// Adds factor times gradient of each example to `total`; an example with factor 0 is not read: 0 * inf is nan.
void add(const float* gradients, int64_t examples, int64_t size, const double* factors, double* total) {
    for (int64_t start = 0; start < size; start += BLOCK) {
        int64_t stop = start + BLOCK < size ? start + BLOCK : size;
        for (int64_t example = 0; example < examples; example++) {
            const float* gradient = gradients + example * size;
            double factor = factors[example];
            if (factor != 0.0)
                for (int64_t k = start; k < stop; k++) total[k] += factor * (double)gradient[k];
        }
    }
}
}
