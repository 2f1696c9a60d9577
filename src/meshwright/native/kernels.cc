// Products of rows with weights in float32, bf16, int8 and int4, and attention over a cache of pages, for x86 with AVX2
// and FMA or with AVX-512, and with the instructions for products of bf16 and int8 that the compiler may use.
//
// Called by XLA through its foreign function interface, and run on its threads; see kernels.py. Weights w[O, I]
// lie in panels. A number of the result is summed in the order of I: it depends on its row and its column alone,
// never on how many others there are. Rows of zeros, as a step has them where nobody's token is, are passed over.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Numbers of work that threads take one after another.
template <typename Work>
class Queue {
 public:
  Queue(int64_t count, Work work) : count_(count), work_(work) {}

  void TakeAll() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) {
      work_(i);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
      if (spins < 4096) {
        _mm_pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  const int64_t count_;
  const Work work_;
  std::atomic<int64_t> next_{0}, done_{0};
};

// work(0), ..., work(count - 1), on this thread and on those of the pool that are free. It never waits for a
// task that has not begun: a pool whose threads all wait, for collectives or in here, starts none.
template <typename Work>
void InParallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  auto queue = std::make_shared<Queue<Work>>(count, work);
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([queue] { queue->TakeAll(); });
  queue->TakeAll();
  queue->Wait();
}

// Vectors of 32-bit numbers, 16 with AVX-512 and 8 with AVX2: what differs between them stands here. A mask of lanes
// is an integer; what is loaded is zero in other lanes, which are not read.

#ifdef __AVX512F__

using Floats = __m512;
using Ints = __m512i;
using Lanes = __mmask16;
constexpr int64_t kLanes = 16;

Floats All(float x) { return _mm512_set1_ps(x); }
Ints All(int32_t x) { return _mm512_set1_epi32(x); }
Floats AsFloats(Ints x) { return _mm512_castsi512_ps(x); }
Ints AsInts(Floats x) { return _mm512_castps_si512(x); }
Floats ToFloats(Ints x) { return _mm512_cvtepi32_ps(x); }
Ints ToInts(Floats x) { return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

Floats Wide(const float* at, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, at); }
Floats Wide(const uint16_t* at, Lanes lanes) {  // bf16
  return AsFloats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at)), 16));
}
Floats Wide(const int8_t* at, Lanes lanes) {
  return ToFloats(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, at)));
}
Ints Load(const int32_t* at) { return _mm512_loadu_si512(at); }
void Store(int32_t* at, Ints x) { _mm512_storeu_si512(at, x); }
void Store(float* at, Lanes lanes, Floats x) { _mm512_mask_storeu_ps(at, lanes, x); }
void Store(int8_t* at, Lanes lanes, Ints x) { _mm512_mask_cvtepi32_storeu_epi8(at, lanes, x); }

Floats Fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
Floats Abs(Floats x) { return _mm512_abs_ps(x); }
Lanes IsNan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
Floats Choose(Lanes lanes, Floats a, Floats b) { return _mm512_mask_mov_ps(b, lanes, a); }
float SumOf(Floats x) { return _mm512_reduce_add_ps(x); }
int32_t SumOf(Ints x) { return _mm512_reduce_add_epi32(x); }
float MaxOf(Floats x) { return _mm512_reduce_max_ps(x); }

Ints Add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
Ints And(Ints a, Ints b) { return _mm512_and_si512(a, b); }
Lanes AtMost(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a, b); }
Ints Xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
Ints Up16(Ints x) { return _mm512_slli_epi32(x, 16); }
Ints EvenBytes(Ints x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }  // the first of each 16 bits, in them
Ints OddBytes(Ints x) { return _mm512_srai_epi16(x, 8); }
Ints SumsOfPairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }

Floats Round(Floats x) { return _mm512_roundscale_ps(x, 8); }
Floats TimesTwoTo(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }

// The order in which lanes are summed: of neighbours here, then of neighbouring sums, until one is left.
constexpr int kOrder[kLanes] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// The sums of 16 vectors of 16 lanes, in that order. Inlined, since vectors whose address is given away are not kept
// in registers.
[[gnu::always_inline]] inline Floats Sums(const Floats* v) {
  Floats eights[8], fours[4], twos[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                              _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0xDD));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {
    twos[i] = _mm512_add_ps(_mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44),
                            _mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xEE));
  }
  const Floats sums =
      _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xDD));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

#else

using Floats = __m256;
using Ints = __m256i;
using Lanes = uint8_t;
constexpr int64_t kLanes = 8;
constexpr Lanes kAll = 0xFF;

Floats All(float x) { return _mm256_set1_ps(x); }
Ints All(int32_t x) { return _mm256_set1_epi32(x); }
Floats AsFloats(Ints x) { return _mm256_castsi256_ps(x); }
Ints AsInts(Floats x) { return _mm256_castps_si256(x); }
Floats ToFloats(Ints x) { return _mm256_cvtepi32_ps(x); }
Ints ToInts(Floats x) { return _mm256_cvtps_epi32(x); }

Ints Mask(Lanes lanes) {
  const Ints bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(All(static_cast<int32_t>(lanes)), bits), bits);
}
// The first numbers of 8, as many as there are lanes.
template <typename T>
__m128i Some(const T* at, Lanes lanes) {
  __m128i x = _mm_setzero_si128();
  std::memcpy(&x, at, __builtin_popcount(lanes) * sizeof(T));
  return x;
}
Floats Wide(const float* at, Lanes lanes) {
  return lanes == kAll ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, Mask(lanes));
}
Floats Wide(const uint16_t* at, Lanes lanes) {  // bf16
  const __m128i x = lanes == kAll ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)) : Some(at, lanes);
  return AsFloats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
Floats Wide(const int8_t* at, Lanes lanes) {
  return ToFloats(_mm256_cvtepi8_epi32(lanes == kAll ? _mm_loadu_si64(at) : Some(at, lanes)));
}
Ints Load(const int32_t* at) { return _mm256_loadu_si256(reinterpret_cast<const Ints*>(at)); }
void Store(int32_t* at, Ints x) { _mm256_storeu_si256(reinterpret_cast<Ints*>(at), x); }
void Store(float* at, Lanes lanes, Floats x) {
  lanes == kAll ? _mm256_storeu_ps(at, x) : _mm256_maskstore_ps(at, Mask(lanes), x);
}
void Store(int8_t* at, Lanes lanes, Ints x) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i bytes = _mm_packs_epi16(halves, halves);
  std::memcpy(at, &bytes, __builtin_popcount(lanes));
}

Floats Fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
Floats Abs(Floats x) { return _mm256_andnot_ps(All(-0.0f), x); }
Lanes IsNan(Floats x) { return static_cast<Lanes>(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))); }
Floats Choose(Lanes lanes, Floats a, Floats b) { return _mm256_blendv_ps(b, a, AsFloats(Mask(lanes))); }
float SumOf(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
int32_t SumOf(Ints x) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
float MaxOf(Floats x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

Ints Add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
Ints And(Ints a, Ints b) { return _mm256_and_si256(a, b); }
Lanes AtMost(Ints a, Ints b) {
  return kAll & ~static_cast<Lanes>(_mm256_movemask_ps(AsFloats(_mm256_cmpgt_epi32(a, b))));
}
Ints Xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
Ints Up16(Ints x) { return _mm256_slli_epi32(x, 16); }
Ints EvenBytes(Ints x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }  // the first of each 16 bits, in them
Ints OddBytes(Ints x) { return _mm256_srai_epi16(x, 8); }
Ints SumsOfPairs(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }

Floats Round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Zero below the least normal number, also if x is not a number and the power not finite, as scalef of AVX-512.
Floats TimesTwoTo(Floats x, Floats power) {
  const Floats least = All(-126.0f), is_less = _mm256_cmp_ps(power, least, _CMP_LT_OQ);
  const Ints exponent = Add(ToInts(Max(least, power)), All(127));
  return _mm256_andnot_ps(is_less, x * AsFloats(_mm256_slli_epi32(exponent, 23)));
}

constexpr int kOrder[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};

// The sums of 8 vectors of 8 lanes, in that order.
[[gnu::always_inline]] inline Floats Sums(const Floats* v) {
  const Floats first = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const Floats second = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31);
}

#endif

Lanes First(int64_t count) {
  return static_cast<Lanes>(count >= kLanes ? (1u << kLanes) - 1 : count > 0 ? (1u << count) - 1 : 0);
}

// Shifts of each lane: to the right with the sign, and to the left.
using Signed = int32_t __attribute__((vector_size(4 * kLanes)));
Ints Down(Ints x, int bits) { return reinterpret_cast<Ints>(reinterpret_cast<Signed>(x) >> bits); }
Ints Up(Ints x, int bits) { return reinterpret_cast<Ints>(reinterpret_cast<Signed>(x) << bits); }

// Kinds of products. A step is 32 bits of a row of weights: kTogether numbers. As an instruction multiplies them they
// are kWords words of 32 bits, each of which it sums into one of a vector's lanes. kHasGroups: each group of steps
// has a scale, and its sum is multiplied by it before it is added to the total.

// Sums of a group in float32. Begin starts one, Both adds two, and Number is the sum to multiply by the group's scale.
struct FloatGroups {
  template <typename Row>
  static Floats Begin(const Row&, int64_t) { return All(0.0f); }
  static Floats Both(Floats a, Floats b) { return a + b; }
  static Floats Number(Floats sum) { return sum; }
};

// Products and sums in float32.
struct Wider : FloatGroups {
  static constexpr bool kHasGroups = false;
  struct Row {};  // further values of a row of x, next to its numbers

  static Floats Dot(Floats sum, Ints w, Ints x) { return Fma(AsFloats(w), AsFloats(x), sum); }
  static Floats Result(Floats sum, const Row&) { return sum; }

  template <typename X>
  static Row Prepare(const X* from, int64_t size, int64_t, int32_t* to) {
    for (int64_t k = 0; k < size; k += kLanes) {
      Store(reinterpret_cast<float*>(to) + k, First(size - k), Wide(from + k, First(size - k)));
    }
    return {};
  }
};

struct Float : Wider {
  static constexpr int64_t kTogether = 1, kOften = 5;
  static constexpr int kWords = 1;
  static int32_t Word(const int32_t* row, int64_t step, int) { return row[step]; }
  static Ints Weight(Ints w, int) { return w; }
};

struct Widened : Wider {  // of bf16
  static constexpr int64_t kTogether = 2;
  static constexpr int kWords = 2;
  static constexpr int64_t kOften = kLanes == 16 ? 5 : 3;  // groups of rows for which a panel's words are made once
  static int32_t Word(const int32_t* row, int64_t step, int i) { return row[2 * step + i]; }
  static Ints Weight(Ints w, int i) { return i ? And(w, All(-65536)) : Up16(w); }
};

#ifdef __AVX512BF16__
struct Bf16 : FloatGroups {
  static constexpr bool kHasGroups = false;
  static constexpr int64_t kTogether = 2, kOften = 5;
  static constexpr int kWords = 1;
  struct Row {};

  static int32_t Word(const int32_t* row, int64_t step, int) { return row[step]; }
  static Ints Weight(Ints w, int) { return w; }
  static Floats Dot(Floats sum, Ints w, Ints x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
  static Floats Result(Floats sum, const Row&) { return sum; }

  static Row Prepare(const uint16_t* from, int64_t size, int64_t, int32_t* to) {
    std::memcpy(to, from, size * sizeof(uint16_t));
    return {};
  }
};
#else
using Bf16 = Widened;
#endif

// In each 32 bits, sum + the products of four unsigned bytes of w and four signed bytes of x. Without an instruction
// for all of it, products are added in pairs first, whose sums must fit into 16 bits, as those of int4 do.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_PRODUCTS_OF_BYTES
#endif
Ints AddProducts(Ints sum, Ints w, Ints x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, w, x);
#elif defined(__AVX512F__)
  return Add(sum, SumsOfPairs(_mm512_maddubs_epi16(w, x), All(0x00010001)));
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
  return Add(sum, SumsOfPairs(_mm256_maddubs_epi16(w, x), All(0x00010001)));
#endif
}

// int8 weights by x rounded to int8, with a scale for each row of x; summed in int32.
struct Int8 {
  static constexpr bool kHasGroups = false;
  static constexpr int64_t kTogether = 4, kOften = 5;

  struct Row {
    float scale;
    int32_t excess;  // of a sum, if weights are made unsigned by adding kMore
  };

#ifdef HAS_PRODUCTS_OF_BYTES
  static constexpr int kWords = 1, kMore = 128;
  static int32_t Word(const int32_t* row, int64_t step, int) { return row[step]; }
  static Ints Weight(Ints w, int) { return Xor(w, All(static_cast<int32_t>(0x80808080))); }  // w + 128
  static Floats Dot(Floats sum, Ints w, Ints x) { return AsFloats(AddProducts(AsInts(sum), w, x)); }
#else  // in int16: the first and third, the second and fourth
  static constexpr int kWords = 2, kMore = 0;
  static int32_t Word(const int32_t* row, int64_t step, int i) {
    const auto first = static_cast<int8_t>(row[step] >> 8 * i), second = static_cast<int8_t>(row[step] >> (8 * i + 16));
    return static_cast<int32_t>((first & 0xFFFFu) | static_cast<uint32_t>(second) << 16);
  }
  static Ints Weight(Ints w, int i) { return i ? OddBytes(w) : EvenBytes(w); }
  static Floats Dot(Floats sum, Ints w, Ints x) {
    Ints more = Add(AsInts(sum), SumsOfPairs(w, x));
    // g++ 12 adds up the products of both words first, for which there are not enough registers: half as fast.
    asm("" : "+v"(more));
    return AsFloats(more);
  }
#endif

  static Floats Result(Floats sum, const Row& row) {
    return ToFloats(Add(AsInts(sum), All(-row.excess))) * All(row.scale);
  }

  // As `quantised_product` of quantised.py has it: x / scale, rounded to even.
  template <typename X>
  static Row Prepare(const X* from, int64_t size, int64_t, int32_t* to) {
    Floats most = All(0.0f);
    Lanes is_nan = 0;
    for (int64_t k = 0; k < size; k += kLanes) {
      const Floats magnitude = Abs(Wide(from + k, First(size - k)));
      is_nan |= IsNan(magnitude);
      most = Max(most, magnitude);
    }
    const float largest = is_nan ? NAN : MaxOf(most), scale = std::max(largest / 127.0f, 1e-30f);
    Ints sum = All(0);
    for (int64_t k = 0; k < size; k += kLanes) {
      const Ints whole = ToInts(Wide(from + k, First(size - k)) / All(scale));
      Store(reinterpret_cast<int8_t*>(to) + k, First(size - k), whole);
      sum = Add(sum, whole);
    }
    return {scale, kMore * SumOf(sum)};
  }
};

// int8 weights converted to float32; multiplied and summed in float32.
struct WideInt8 : Wider {
  static constexpr int64_t kTogether = 4, kOften = 3;
  static constexpr int kWords = 4;
  static int32_t Word(const int32_t* row, int64_t step, int i) { return row[4 * step + i]; }
  static Ints Weight(Ints w, int i) { return AsInts(ToFloats(Down(Up(w, 24 - 8 * i), 24))); }
};

// int8 weights converted to bf16, which represents every int8. A word has the numbers i and i + 2 of a step.
#ifdef __AVX512BF16__
struct Int8ByBf16 : Bf16 {
  static constexpr int64_t kTogether = 4, kOften = 3;
  static constexpr int kWords = 2;

  static int32_t Word(const int32_t* row, int64_t step, int i) {
    const auto* const numbers = reinterpret_cast<const uint16_t*>(row) + 4 * step + i;
    return static_cast<int32_t>(numbers[0] | static_cast<uint32_t>(numbers[2]) << 16);
  }
  static Ints Weight(Ints w, int i) {
    const Ints first = WideInt8::Weight(w, i), second = WideInt8::Weight(w, i + 2);
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);  // the lower halves are zero
  }
};
#else
using Int8ByBf16 = WideInt8;
#endif

// int4, two in a byte and the first in its lower half, multiplied and summed in float32.
struct Int4 : Wider {
  static constexpr bool kHasGroups = true;
  static constexpr int64_t kTogether = 8, kOften = 3;
  static constexpr int kWords = 8;
  static int32_t Word(const int32_t* row, int64_t step, int i) { return row[8 * step + i]; }
  static Ints Weight(Ints w, int i) { return AsInts(ToFloats(Down(Up(w, 28 - 4 * i), 28))); }
};

// int4 multiplied as bf16, which represents every int4. A word has the numbers i and i + 4 of a step.
#ifdef __AVX512BF16__
struct Int4ByBf16 : Bf16 {
  static constexpr bool kHasGroups = true;
  static constexpr int64_t kTogether = 8, kOften = 3;
  static constexpr int kWords = 4;

  static int32_t Word(const int32_t* row, int64_t step, int i) {
    const auto* const numbers = reinterpret_cast<const uint16_t*>(row) + 8 * step + i;
    return static_cast<int32_t>(numbers[0] | static_cast<uint32_t>(numbers[4]) << 16);
  }
  // The table has 0 to 7 and -8 to -1 in bf16, in the order of their four bits, twice: a register has 32 numbers.
  static Ints Weight(Ints w, int i) {
    alignas(64) static constexpr uint16_t kNumbers[32] = {
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0,
        0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0,
        0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};
    return _mm512_permutexvar_epi16(And(Down(w, 4 * i), All(0x000F000F)), _mm512_load_si512(kNumbers));
  }
};
#else
using Int4ByBf16 = Int4;
#endif

// int4 weights by x rounded to int8, with a scale for each row of x; a group's products are summed in int32. A word
// has the numbers i, i + 2, i + 4 and i + 6 of a step. Weights are made unsigned by adding kMore.
struct Int4ByInt8 {
  static constexpr bool kHasGroups = true;
  static constexpr int64_t kTogether = 8, kOften = 3;
  static constexpr int kWords = 2, kMore = 8;

  struct Row {
    float scale;
    std::vector<int32_t> begins;  // first value of each group's sum: minus the excess by unsigned weights
  };

  static int32_t Word(const int32_t* row, int64_t step, int i) {
    const auto* const numbers = reinterpret_cast<const uint8_t*>(row) + 8 * step + i;
    return static_cast<int32_t>(numbers[0] | numbers[2] << 8 | numbers[4] << 16 | static_cast<uint32_t>(numbers[6]) << 24);
  }
  static Ints Weight(Ints w, int i) { return Xor(And(Down(w, 4 * i), All(0x0F0F0F0F)), All(0x08080808)); }  // w + 8
  static Floats Dot(Floats sum, Ints w, Ints x) {
    return AsFloats(AddProducts(AsInts(sum), w, x));
  }
  static Floats Begin(const Row& row, int64_t group) { return AsFloats(All(row.begins[group])); }
  static Floats Both(Floats a, Floats b) { return AsFloats(Add(AsInts(a), AsInts(b))); }
  static Floats Number(Floats sum) { return ToFloats(AsInts(sum)); }
  static Floats Result(Floats sum, const Row& row) { return sum * All(row.scale); }

  template <typename X>
  static Row Prepare(const X* from, int64_t size, int64_t group, int32_t* to) {
    Row row{Int8::Prepare(from, size, group, to).scale, std::vector<int32_t>(size / group)};
    const auto* number = reinterpret_cast<const int8_t*>(to);
    for (int32_t& sum : row.begins) {
      for (int64_t k = 0; k < group; ++k) sum -= kMore * *number++;
    }
    return row;
  }
};

// A panel holds kPanel consecutive rows of w; the last panel may have fewer. It is stored step by step, each step with its
// rows side by side in two vectors, so that a number of x is loaded once for two products. Weights are read in this order
// once for each kRows rows of x: from memory for the first of them, from a core's cache for the others.
constexpr int64_t kVectors = 2, kPanel = kVectors * kLanes;
#ifdef __AVX512F__
constexpr int64_t kRows = 14;     // whose sums are in registers at once
constexpr int64_t kBlock = 2048;  // words whose panel stays in the second cache
constexpr int64_t kGroups = 1 << 20;  // of rows: all
#else
constexpr int64_t kRows = 6;
constexpr int64_t kBlock = 256;  // words whose panel stays in the first cache
constexpr int64_t kGroups = 32;  // of rows, whose words of a block stay in the second cache
#endif
// Weights are prefetched this many steps, and scales this many groups, before they are read: memory takes about 150 ns
// to answer.
constexpr int64_t kAhead = 64, kGroupsAhead = 16;
constexpr int64_t kLine = 64;  // bytes of a cache's line

// With groups a tile has half of the rows, since the sums of a group take registers next to the totals.
template <typename Kind>
constexpr int64_t kRowsOf = Kind::kHasGroups ? kRows / 2 : kRows;

// The scales of a panel: f32[groups, columns], which begin with group `first` of a row. A group has `steps` steps.
struct Scales {
  const float* at;
  int64_t steps, columns, first;
};

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Weights to fetch from memory while a tile is computed, `bytes` with each word or step, so that memory is never idle.
struct Ahead {
  const char* at;
  int64_t bytes;
};

// Fetch the line with this number into the first cache.
template <typename T>
void Fetch(const T* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Add `steps` steps of the products of R rows of x and a panel to the rows' sums, at `places` in y f32[..., width].
// is_first: the sums begin at 0. is_last: results are written, not sums. kIsMade: the panel has words, not steps.
template <typename Kind, int R, bool kIsMade>
void Tile(const int32_t* x, const int32_t* w, int64_t steps, const typename Kind::Row* rows, const int64_t* places,
          int64_t num_rows, float* y, int64_t width, const Lanes* lanes, bool is_first, bool is_last, Ahead ahead,
          Scales scales) {
  Floats sums[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = is_first || r >= num_rows ? All(0.0f) : Wide(y + places[r] * width + v * kLanes, lanes[v]);
    }
  }
  constexpr int kWords = kIsMade ? 1 : Kind::kWords;  // of one iteration
  // With few rows, words of a group are added to two sums in turns, since an addition waits for the one before it.
  constexpr int kTurns = Kind::kHasGroups && R <= 4 ? 2 : 1;
  const auto add = [&](Floats(*to)[R][kVectors], int64_t k) {
    constexpr int64_t kFetched = kIsMade ? kLine : kPanel * sizeof(int32_t);
#pragma GCC unroll 2
    for (int64_t b = 0; b < kFetched; b += kLine) Fetch(ahead.at + b);
    ahead.at += ahead.bytes;
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      Ints ws[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        ws[v] = Load(w + (kIsMade ? k * kWords + i : k) * kPanel + v * kLanes);
        if (!kIsMade) ws[v] = Kind::Weight(ws[v], i);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Ints xs = All(x[(k * kWords + i) * R + r]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) to[i % kTurns][r][v] = Kind::Dot(to[i % kTurns][r][v], ws[v], xs);
      }
    }
  };
  const int64_t count = steps * Kind::kWords / kWords;
  if constexpr (!Kind::kHasGroups) {
    for (int64_t k = 0; k < count; ++k) add(&sums, k);
  } else {
    const int64_t of_group = scales.steps * Kind::kWords / kWords;
    // Iterations of a group of 32 numbers, the usual size: with a constant, g++ 12 copies no sums between registers.
    constexpr int64_t kUsual = 32 / Kind::kTogether * Kind::kWords / kWords;
    for (int64_t k = 0; k < count; k += of_group, scales.at += scales.columns, ++scales.first) {
      Floats turns[kTurns][R][kVectors];
#pragma GCC unroll 2
      for (int t = 0; t < kTurns; ++t) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            turns[t][r][v] = t ? All(0.0f) : Kind::Begin(rows[r < num_rows ? r : 0], scales.first);
          }
        }
      }
      if (of_group == kUsual) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kUsual; ++i) add(turns, k + i);
      } else {
        for (int64_t i = 0; i < of_group; ++i) add(turns, k + i);
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        // The processor's own prefetcher follows only one stream of this loop, the weights.
        const auto* const later = scales.at + kGroupsAhead * kPanel + v * kLanes;
        if constexpr (!kIsMade) Fetch(later);
        const Floats scale = Wide(scales.at + v * kLanes, lanes[v]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Floats sum = kTurns == 2 ? Kind::Both(turns[0][r][v], turns[kTurns - 1][r][v]) : turns[0][r][v];
          sums[r][v] = Fma(Kind::Number(sum), scale, sums[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (r >= num_rows) break;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Store(y + places[r] * width + v * kLanes, lanes[v], is_last ? Kind::Result(sums[r][v], rows[r]) : sums[r][v]);
    }
  }
}

// Tiles of num_rows rows, for a panel of steps as it is stored, and for a panel of words (steps if these are words).
template <typename Kind>
struct Tiles {
  int64_t num_rows;
  decltype(&Tile<Kind, 1, false>) of_steps, of_words;

  // The smallest tiles of at least `rows` rows.
  template <int R = 1>
  static Tiles For(int64_t rows) {
    if constexpr (R < kRowsOf<Kind>) {
      if (rows > R) return For<std::min<int>(2 * R, kRowsOf<Kind>)>(rows);
    }
    return {R, Tile<Kind, R, false>, Tile<Kind, R, (Kind::kWords > 1)>};
  }
};

// Rows of x that are not all zeros, as tiles read them: in groups, each word of all rows of a group together.
template <typename Kind>
struct Rows {
  std::vector<int64_t> places;  // of these rows in x
  int64_t count, steps, num_groups;
  Tiles<Kind> tiles, last;  // of a group, and of the last one, which may have fewer rows
  std::unique_ptr<int32_t[]> numbers;
  std::vector<typename Kind::Row> others;

  template <typename X>
  Rows(ffi::ThreadPool& pool, const X* x, int64_t num_rows, int64_t size, int64_t group)
      : places(Places(x, num_rows, size)), count(places.size()), steps(Ceil(size, Kind::kTogether)) {
    tiles = Tiles<Kind>::For(Ceil(count, std::max<int64_t>(1, Ceil(count, kRowsOf<Kind>))));
    num_groups = Ceil(count, tiles.num_rows);
    last = Tiles<Kind>::For(count - (num_groups - 1) * tiles.num_rows);
    numbers.reset(new int32_t[num_groups * tiles.num_rows * steps * Kind::kWords]);
    others.resize(num_groups * tiles.num_rows);
    const auto prepare = [this, x, size, group](int64_t number) {
      thread_local std::vector<int32_t> room;
      room.resize(this->steps * Kind::kWords);
      const int64_t first = number * this->tiles.num_rows, apart = this->Of(number).num_rows;
      int32_t* const numbers_of_group = this->numbers.get() + first * this->steps * Kind::kWords;
      if (first + apart > this->count) std::fill_n(numbers_of_group, apart * this->steps * Kind::kWords, 0);
      for (int64_t r = 0; r < std::min(apart, this->count - first); ++r) {
        this->others[first + r] = Kind::Prepare(x + this->places[first + r] * size, size, group, room.data());
        int32_t* to = numbers_of_group + r;
        for (int64_t k = 0; k < this->steps; ++k) {
          for (int i = 0; i < Kind::kWords; ++i, to += apart) *to = Kind::Word(room.data(), k, i);
        }
      }
    };
    InParallel(pool, num_groups, prepare);
  }

  static bool IsZero(float x) { return x == 0; }
  static bool IsZero(uint16_t x) { return (x & 0x7FFF) == 0; }  // bf16

  template <typename X>
  static std::vector<int64_t> Places(const X* x, int64_t num_rows, int64_t size) {
    std::vector<int64_t> found;
    for (int64_t r = 0; r < num_rows; ++r, x += size) {
      if (!std::all_of(x, x + size, [](X number) { return IsZero(number); })) found.push_back(r);
    }
    return found;
  }

  const Tiles<Kind>& Of(int64_t group) const { return group + 1 < num_groups ? tiles : last; }
};

// Steps of a panel as words, where these are others, with zeros in place of the columns that it has not.
template <typename Kind>
const int32_t* Made(const int32_t* w, int64_t steps, int64_t columns) {
  alignas(64) thread_local int32_t room[kBlock * kPanel];
  alignas(64) int32_t filled[kPanel] = {};
  int32_t* to = room;
  for (int64_t k = 0; k < steps; ++k, w += columns) {
    const int32_t* step = w;
    if (columns < kPanel) step = std::copy_n(w, columns, filled) - columns;
    for (int i = 0; i < Kind::kWords; ++i, to += kPanel) {
      for (int64_t v = 0; v < kVectors; ++v) {
        const Ints x = Load(step + v * kLanes);
        Store(to + v * kLanes, Kind::kWords > 1 ? Kind::Weight(x, i) : x);
      }
    }
  }
  return room;
}

// A block of a panel, of which `first` is the first column, for groups of rows; meanwhile the next one is fetched.
template <typename Kind>
void Block(const Rows<Kind>& rows, const int32_t* panel, const int32_t* next, Scales scales, float* y, int64_t width,
           int64_t first, int64_t from, int64_t steps, int64_t begin, int64_t end) {
  const int64_t columns = std::min(kPanel, width - first), groups = end - begin, words = steps * Kind::kWords;
  const int64_t step_bytes = kPanel * sizeof(int32_t), bytes = steps * step_bytes;
  const auto* const beyond = reinterpret_cast<const char*>(panel) + kAhead * step_bytes;
  const bool makes = columns < kPanel || (Kind::kWords > 1 && rows.num_groups >= Kind::kOften);
  Lanes lanes[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) lanes[v] = First(columns - v * kLanes);
  if (makes) panel = Made<Kind>(panel, steps, columns);
  for (int64_t group = begin; group < end; ++group) {
    const Tiles<Kind>& tiles = rows.Of(group);
    const int64_t row = group * rows.tiles.num_rows;
    const int32_t* x = rows.numbers.get() + (row * rows.steps + from * tiles.num_rows) * Kind::kWords;
    // Of made words each group of rows fetches its part of the next block.
    const Ahead part{reinterpret_cast<const char*>(next) + (group - begin) * bytes / groups, bytes / (groups * words)};
    (makes ? tiles.of_words : tiles.of_steps)(x, panel, steps, rows.others.data() + row, rows.places.data() + row,
                                              rows.count - row, y + first, width, lanes, from == 0,
                                              from + steps == rows.steps, makes ? part : Ahead{beyond, step_bytes},
                                              scales);
  }
}

// Panels `begin` to `end` for all rows. Weights are read in their order, unless the words of all rows are too many for
// the second cache: then a block of each panel, and of that for some groups of rows at a time.
template <typename Kind>
void Panels(const Rows<Kind>& rows, const int32_t* w, Scales scales, float* y, int64_t width, int64_t begin,
            int64_t end) {
  constexpr int64_t kSteps = kBlock / Kind::kWords;
  const auto block = [&](int64_t panel, int64_t from) {
    return w + panel * kPanel * rows.steps + from * std::min(kPanel, width - panel * kPanel);
  };
  const auto scales_of = [&](int64_t panel, int64_t from) -> Scales {
    if (!Kind::kHasGroups) return scales;
    const int64_t columns = std::min(kPanel, width - panel * kPanel);
    const float* const of_panel = scales.at + panel * kPanel * (rows.steps / scales.steps);
    return {of_panel + from / scales.steps * columns, scales.steps, columns, from / scales.steps};
  };
  const bool are_few = rows.num_groups * rows.steps <= kGroups * kSteps;
  const int64_t span = are_few ? rows.steps : kSteps, groups = are_few ? rows.num_groups : kGroups;
  for (int64_t start = 0; start < rows.steps; start += span) {
    const int64_t stop = std::min(rows.steps, start + span);
    for (int64_t some = 0; some < rows.num_groups; some += groups) {
      for (int64_t panel = begin; panel < end; ++panel) {
        for (int64_t from = start; from < stop; from += kSteps) {
          const int32_t *here = block(panel, from), *next = here + (are_few ? kSteps : rows.steps) * kPanel;
          Block<Kind>(rows, here, next, scales_of(panel, from), y, width, panel * kPanel, from,
                      std::min(kSteps, stop - from), some, std::min(some + groups, rows.num_groups));
        }
      }
    }
  }
}

template <typename Kind, typename X>
void Multiply(ffi::ThreadPool& pool, const X* x, const int32_t* w, float* y, int64_t num_rows, int64_t size,
              int64_t width, Scales scales = {}) {
  const Rows<Kind> rows(pool, x, num_rows, size, scales.steps * Kind::kTogether);
  for (int64_t r = 0, kept = 0; r < num_rows; ++r) {
    if (kept < rows.count && rows.places[kept] == r) {
      ++kept;
    } else {
      std::fill_n(y + r * width, width, 0.0f);
    }
  }
  if (!rows.count) return;
  // Eight parts for each thread, since some begin late.
  const int64_t panels = Ceil(width, kPanel), part = Ceil(panels, 8 * std::max<int64_t>(1, pool.num_threads()));
  InParallel(pool, Ceil(panels, part), [=, &rows](int64_t i) {
    Panels<Kind>(rows, w, scales, y, width, i * part, std::min(panels, (i + 1) * part));
  });
}

// The steps of a row of w[O, I], which must be whole; none where they are not.
int64_t StepsOf(const ffi::AnyBuffer& w) {
  const auto sizes = w.dimensions();
  if (sizes.size() != 2 || sizes[0] == 0) return 0;
  const int64_t bytes = static_cast<int64_t>(w.size_bytes()) / sizes[0];
  return bytes % 4 ? 0 : bytes / 4;
}

// Whether x[R, I] and w[O, I] fit, where a number of w's type is `in_one` weights.
bool Fit(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, int64_t in_one = 1) {
  const auto sizes = x.dimensions();
  return StepsOf(w) && sizes.size() == 2 && sizes[1] == in_one * w.dimensions()[1];
}

template <typename Kind, typename X>
ffi::Error Multiplied(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                      ffi::ResultBuffer<ffi::F32>& y, Scales scales = {}) {
  const auto sizes = x.dimensions();
  Multiply<Kind>(pool, static_cast<const X*>(x.untyped_data()), static_cast<const int32_t*>(w.untyped_data()),
                 y->typed_data(), sizes[0], sizes[1], w.dimensions()[0], scales);
  return ffi::Error::Success();
}

ffi::Error NoProduct() { return ffi::Error::InvalidArgument("there is no product of these types"); }

// y f32[R, O] of x[R, I] and w[O, I] in panels: w f32, bf16 or int8, and x f32, or bf16 where w is not f32.
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  if (!Fit(x, w)) return ffi::Error::InvalidArgument("x[R, I] and w[O, I] of whole steps are needed");
  const auto of_x = x.element_type(), of_w = w.element_type();
  if (of_w == ffi::F32 && of_x == ffi::F32) return Multiplied<Float, float>(pool, x, w, y);
  if (of_w == ffi::BF16 && of_x == ffi::F32) return Multiplied<Widened, float>(pool, x, w, y);
  if (of_w == ffi::BF16 && of_x == ffi::BF16) return Multiplied<Bf16, uint16_t>(pool, x, w, y);
  if (of_w == ffi::S8 && of_x == ffi::BF16) return Multiplied<Int8, uint16_t>(pool, x, w, y);
  if (of_w == ffi::S8 && of_x == ffi::F32) return Multiplied<Int8, float>(pool, x, w, y);
  return NoProduct();
}

// y f32[R, O] of x[R, I] in f32 or bf16 and int8 w[O, I] in panels, whose numbers are multiplied as they are.
ffi::Error WidenedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  if (!Fit(x, w) || w.element_type() != ffi::S8) {
    return ffi::Error::InvalidArgument("x[R, I] and int8 w[O, I] of whole steps are needed");
  }
  if (x.element_type() == ffi::F32) return Multiplied<WideInt8, float>(pool, x, w, y);
  if (x.element_type() == ffi::BF16) return Multiplied<Int8ByBf16, uint16_t>(pool, x, w, y);
  return NoProduct();
}

// y f32[R, O] of x[R, I] in f32 or bf16, and int4 w[O, I / 2] and its scales f32[O, G] in panels. rounds: round x to
// int8 first.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                          ffi::ResultBuffer<ffi::F32> y, bool rounds) {
  const auto of_scales = scales.dimensions();
  const int64_t steps = StepsOf(w), groups = of_scales.size() == 2 ? of_scales[1] : 0;
  const bool fit = Fit(x, w, 2) && w.element_type() == ffi::S8 && groups && of_scales[0] == w.dimensions()[0];
  if (!fit || steps % groups || kBlock / Int4::kWords % (steps / groups)) {
    return ffi::Error::InvalidArgument("x[R, I], w[O, I / 2] and scales[O, G] of groups of whole steps are needed");
  }
  const Scales of_groups{scales.typed_data(), steps / groups, kPanel, 0};
  const auto of_x = x.element_type();
  if (rounds && of_x == ffi::F32) return Multiplied<Int4ByInt8, float>(pool, x, w, y, of_groups);
  if (rounds && of_x == ffi::BF16) return Multiplied<Int4ByInt8, uint16_t>(pool, x, w, y, of_groups);
  if (of_x == ffi::F32) return Multiplied<Int4, float>(pool, x, w, y, of_groups);
  if (of_x == ffi::BF16) return Multiplied<Int4ByBf16, uint16_t>(pool, x, w, y, of_groups);
  return NoProduct();
}

// w[O, I] in panels.
ffi::Error InPanels(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> panels) {
  const int64_t steps = StepsOf(w), width = steps ? w.dimensions()[0] : 0;
  if (!steps) return ffi::Error::InvalidArgument("w[O, I] of whole steps is needed");
  const auto* const from = static_cast<const int32_t*>(w.untyped_data());
  auto* const to = static_cast<int32_t*>(panels->untyped_data());
  InParallel(pool, Ceil(width, kPanel), [=](int64_t panel) {
    const int64_t first = panel * kPanel, columns = std::min(kPanel, width - first);
    for (int64_t k = 0; k < steps; ++k) {
      for (int64_t i = 0; i < columns; ++i) to[first * steps + k * columns + i] = from[(first + i) * steps + k];
    }
  });
  return ffi::Error::Success();
}

// Rows ids i32[N] of w[O, I] in panels, each from 0 to O - 1.
ffi::Error RowsOfPanels(ffi::AnyBuffer w, ffi::Buffer<ffi::S32> ids, ffi::Result<ffi::AnyBuffer> rows) {
  const int64_t steps = StepsOf(w), width = steps ? w.dimensions()[0] : 0;
  if (!steps) return ffi::Error::InvalidArgument("w[O, I] of whole steps is needed");
  const auto* const from = static_cast<const int32_t*>(w.untyped_data());
  auto* to = static_cast<int32_t*>(rows->untyped_data());
  for (size_t n = 0; n < ids.element_count(); ++n) {
    const int64_t id = std::clamp<int64_t>(ids.typed_data()[n], 0, width - 1), first = id / kPanel * kPanel;
    const int64_t columns = std::min(kPanel, width - first);
    for (int64_t k = 0; k < steps; ++k) *to++ = from[first * steps + k * columns + id - first];
  }
  return ffi::Error::Success();
}

// The numbers as they are. XLA fuses nothing with it, so that its operand is computed once, for all that read it.
ffi::Error Once(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

// Attention of queries over the pages of their sequences.

// e^x for x <= 0, to two units in the last place.
Floats Exp(Floats x) {
  const Floats whole = Round(x * All(1.44269504f));
  Floats rest = Fma(whole, All(-0.693359375f), x);  // ln 2 in two parts (Cephes)
  rest = Fma(whole, All(2.12194440e-4f), rest);
  Floats sum = All(1.9875691500e-4f);
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f}) {
    sum = Fma(sum, rest, All(factor));
  }
  return TimesTwoTo(sum, whole);
}

// One layer's pool of keys or values: [pages, heads, size, width], in int8 with a scale for each [..., size].
template <typename T>
struct Pool {
  const T* values;
  const float* scales;
  int64_t width;

  const T* At(int64_t row) const { return values + row * width; }
};

// Keys are prefetched this many tiles, and values this many positions, before they are read. A page of a head is short, and
// the processor's own prefetcher starts anew at each page.
constexpr int64_t kTilesAhead = 2, kValuesAhead = 32;

struct Scores {
  float scale, softcap;  // no cap where 0
  int64_t window;        // positions that a query sees; all before it where 0
  bool chunked;          // of those the ones of its own chunk of so many
};

struct Sizes {
  int64_t num_rows, length, num_heads, num_kv_heads, page, pages_of_row;
};

// The pages of a row from the first to the last that its queries see, and where their numbers lie. least, last: the first
// and the last position that they see.
struct Pages {
  const int32_t* table;
  int64_t head, num_heads, size, padded;
  int64_t least = 0, last = 0, first_page = 0, end_page = 0;

  int64_t Row(int64_t n) const { return (static_cast<int64_t>(table[n]) * num_heads + head) * size; }  // of the pool
  int64_t RowOf(int64_t position) const { return Row(position / size) + position % size; }
  int64_t Place(int64_t n) const { return (n - first_page) * padded; }  // among a line's weights
};

// One query of one head. Those that meet the same keys are attended with side by side: a key is then read once for
// kLines of them. What is summed for a line, and in which order, does not depend on those beside it.
struct Line {
  const float* q;
  float* out;
  int64_t position, least;  // the last and the first position that it sees
  float* weights;           // `padded` for each page, kStride apart; before the softmax they are scores
  float sum;                // by which weights are to be divided
};

constexpr int64_t kLines = 4, kBlockLines = 16;

// tile f32[L, kLanes]: L lines by kLanes keys or fewer, from `row` of the pool on. Meanwhile the same number of rows is
// prefetched from `later` on.
template <int L, typename T>
void Products(const Line* lines, const Pool<T>& keys, int64_t row, int64_t count, const T* later, float* tile) {
  constexpr int kKeys = kLanes / L;
  for (int64_t begin = 0; begin < count; begin += kKeys) {
    Floats sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = All(0.0f);
    for (int64_t h = 0; h < keys.width; h += kLanes) {
      const Lanes lanes = First(keys.width - h);
      Floats some[L];
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) some[l] = Wide(lines[l].q + h, lanes);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const int64_t own = row + std::min<int64_t>(begin + k, count - 1);
        const Floats key = Wide(keys.values + own * keys.width + h, lanes);
        Fetch(later + (begin + k) * keys.width + h);
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l) sums[l * kKeys + k] = Fma(some[l], key, sums[l * kKeys + k]);
      }
    }
    alignas(64) float each[kLanes];
    Store(each, First(kLanes), Sums(sums));
    for (int l = 0; l < L; ++l) std::memcpy(tile + l * kLanes + begin, each + l * kKeys, kKeys * sizeof(float));
  }
}

// Queries of kLanes lines by the keys of a step, each line in a lane: nothing is summed over the lanes of a vector, and
// a number of a key is multiplied with all lines. The numbers are summed as `Products` sums them.
constexpr int kKeysTogether = 4;

// The sums over lanes kOrder[kFirst], ..., kOrder[kFirst + kCount - 1] of `width` numbers of queries q[width][kLanes].
// kWidth: the width if it is known at compile time, so that loops over it are unrolled; otherwise 0.
template <int kWidth, int kFirst, int kCount>
[[gnu::always_inline]] inline void SumsInOrder(const float* q, const float* const* keys, int64_t width, Floats* sums) {
  if constexpr (kCount == 1) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeysTogether; ++k) sums[k] = All(0.0f);
#pragma GCC unroll 8
    for (int64_t h = kOrder[kFirst]; h < (kWidth ? kWidth : width); h += kLanes) {
      const Floats some = Wide(q + h * kLanes, First(kLanes));
#pragma GCC unroll 4
      for (int k = 0; k < kKeysTogether; ++k) sums[k] = Fma(some, All(keys[k][h]), sums[k]);
    }
  } else {
    Floats others[kKeysTogether];
    SumsInOrder<kWidth, kFirst, kCount / 2>(q, keys, width, sums);
    SumsInOrder<kWidth, kFirst + kCount / 2, kCount / 2>(q, keys, width, others);
#pragma GCC unroll 4
    for (int k = 0; k < kKeysTogether; ++k) sums[k] = sums[k] + others[k];
  }
}

// tile f32[keys, lines]: kLanes keys or fewer, from `row` of the pool on, by the kLanes lines of q[width][kLanes].
template <int kWidth, typename T>
void ProductsOfAll(const float* q, const Pool<T>& keys, int64_t row, int64_t count, float* tile) {
  const int64_t width = keys.width;
  thread_local std::vector<float> widened;
  if (!std::is_same_v<T, float>) widened.resize(kKeysTogether * width);
  for (int64_t begin = 0; begin < count; begin += kKeysTogether) {
    const float* each[kKeysTogether];
    for (int64_t k = 0; k < kKeysTogether; ++k) {
      const T* const own = keys.values + (row + std::min(begin + k, count - 1)) * width;
      if constexpr (std::is_same_v<T, float>) {
        each[k] = own;
      } else {
        float* const wide = widened.data() + k * width;
        for (int64_t h = 0; h < width; h += kLanes) {
          Store(wide + h, First(width - h), Wide(own + h, First(width - h)));
        }
        each[k] = wide;
      }
    }
    Floats sums[kKeysTogether];
    SumsInOrder<kWidth, 0, kLanes>(q, each, width, sums);
    for (int64_t k = 0; k < kKeysTogether; ++k) Store(tile + (begin + k) * kLanes, First(kLanes), sums[k]);
  }
}

Floats Capped(Floats scores, float softcap) {
  alignas(64) float each[kLanes];
  Store(each, First(kLanes), scores);
  for (float& score : each) score = softcap * std::tanh(score / softcap);
  return Wide(each, First(kLanes));
}

// out of L lines += the values from position `begin` to `end` by their weights, in their order. kStride: from a
// line's weight to its next; if it is not 1, the weights of all lines at a position are side by side. next: the address to
// prefetch from after the last value.
template <int L, int kStride, typename T>
void AddValues(const Line* lines, const Pool<T>& values, const Pages& pages, const T* next, int64_t begin, int64_t end) {
  constexpr int kWide = kLanes == 16 ? 4 : 8 / L;  // vectors of a line whose sums are in registers
  if (begin >= end) return;
  for (int64_t o = 0; o < values.width; o += kLanes * kWide) {
    Lanes lanes[kWide];
    Floats sums[L][kWide];
#pragma GCC unroll 8
    for (int i = 0; i < kWide; ++i) {
      lanes[i] = First(values.width - o - kLanes * i);
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) sums[l][i] = Wide(lines[l].out + o + kLanes * i, lanes[i]);
    }
    for (int64_t s = begin; s < end;) {
      const int64_t n = s / pages.size, inside = s - n * pages.size, until = std::min(end, (n + 1) * pages.size);
      const T* at = values.values + (pages.Row(n) + inside) * values.width + o;
      const int64_t weight = pages.Place(n) + inside;
      const int64_t left = until - s;
      const T* later = at + kValuesAhead * values.width;
      for (int64_t i = 0; i < left; ++i, at += values.width, later += values.width) {
        if (i + kValuesAhead == left) {
          later = until < end ? values.At(pages.Row(n + 1)) + o : next;
        }
        Floats some[kWide];
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) Fetch(later + kLanes * j);
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) some[j] = Wide(at + kLanes * j, lanes[j]);
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l) {
          const float* const own = kStride == 1 ? lines[l].weights : lines[0].weights + l;
          const Floats by = All(own[(weight + i) * kStride]);
#pragma GCC unroll 8
          for (int j = 0; j < kWide; ++j) sums[l][j] = Fma(by, some[j], sums[l][j]);
        }
      }
      s = until;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kWide; ++i) {
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) Store(lines[l].out + o + kLanes * i, lanes[i], sums[l][i]);
    }
  }
}

// work(L, from) for all of `count` lines, kLines at a time while there are as many.
template <typename Work>
void ForLines(int64_t count, Work work) {
  int64_t from = 0;
  for (; from + kLines <= count; from += kLines) work(std::integral_constant<int, kLines>(), from);
  for (; from + 2 <= count; from += 2) work(std::integral_constant<int, 2>(), from);
  for (; from < count; ++from) work(std::integral_constant<int, 1>(), from);
}

// The scores of lines over all pages, in their `weights`. Meanwhile the first values are prefetched.
template <typename T>
void ScoresOf(const Line* lines, int64_t num_lines, const Pool<T>& keys, const Pool<T>& values, const Pages& pages,
              const Scores& how) {
  // The address that is read `kTilesAhead` tiles after the keys at a position: of a key or, after the last key, of a value.
  const auto later = [&](int64_t position) {
    const int64_t ahead = position + kTilesAhead * kLanes;
    if (ahead <= pages.last) return keys.At(pages.RowOf(ahead));
    return values.At(pages.RowOf(std::min(pages.least + (ahead - pages.last - 1) / kLanes * kLanes, pages.last)));
  };
  ForLines(num_lines, [&](auto together, int64_t from) {
    constexpr int L = together;
    alignas(64) float tile[L * kLanes];
    for (int64_t n = pages.first_page; n < pages.end_page; ++n) {
      for (int64_t s = 0; s < pages.padded; s += kLanes) {
        const int64_t begin = n * pages.size + s, row = pages.Row(n) + s, count = std::min(kLanes, pages.size - s);
        Lanes seen[L], some = 0;
        for (int l = 0; l < L; ++l) {
          const Line& line = lines[from + l];
          seen[l] = First(std::min(count, line.position + 1 - begin)) & ~First(line.least - begin);
          some |= seen[l];
        }
        if (some) Products<L>(lines + from, keys, row, count, later(begin), tile);
        for (int l = 0; l < L; ++l) {
          Floats scores = Wide(tile + l * kLanes, First(kLanes)) * All(how.scale);
          if (keys.scales) scores = scores * Wide(keys.scales + row, First(count));
          if (how.softcap > 0) scores = Capped(scores, how.softcap);
          scores = Choose(seen[l], scores, All(-INFINITY));
          Store(lines[from + l].weights + pages.Place(n) + s, First(kLanes), scores);
        }
      }
    }
  });
}

// As ScoresOf, for kLanes lines: at each position their scores are side by side, in the `weights` of the first.
template <typename T>
void ScoresOfAll(const Line* lines, const Pool<T>& keys, const Pages& pages, const Scores& how) {
  thread_local std::vector<float> queries;
  queries.resize(keys.width * kLanes);
  alignas(64) int32_t last[kLanes], least[kLanes];
  int64_t first = lines[0].least, end = 0;
  for (int64_t l = 0; l < kLanes; ++l) {
    for (int64_t h = 0; h < keys.width; ++h) queries[h * kLanes + l] = lines[l].q[h];
    last[l] = static_cast<int32_t>(lines[l].position), least[l] = static_cast<int32_t>(lines[l].least);
    first = std::min(first, lines[l].least), end = std::max(end, lines[l].position + 1);
  }
  alignas(64) float tile[kLanes * kLanes];
  for (int64_t n = pages.first_page; n < pages.end_page; ++n) {
    for (int64_t s = 0; s < pages.padded; s += kLanes) {
      const int64_t begin = n * pages.size + s, row = pages.Row(n) + s, count = std::min(kLanes, pages.size - s);
      if (begin < end && begin + count > first) {
        const auto products = keys.width == 64    ? ProductsOfAll<64, T>
                              : keys.width == 128 ? ProductsOfAll<128, T>
                                                  : ProductsOfAll<0, T>;
        products(queries.data(), keys, row, count, tile);
      }
      for (int64_t k = 0; k < kLanes; ++k) {
        Floats scores = All(-INFINITY);
        if (k < count) {
          const Ints position = All(static_cast<int32_t>(begin + k));
          const Lanes seen = AtMost(Load(least), position) & AtMost(position, Load(last));
          Floats some = Wide(tile + k * kLanes, First(kLanes)) * All(how.scale);
          if (keys.scales) some = some * All(keys.scales[row + k]);
          if (how.softcap > 0) some = Capped(some, how.softcap);
          scores = Choose(seen, some, scores);
        }
        Store(lines[0].weights + (pages.Place(n) + s + k) * kLanes, First(kLanes), scores);
      }
    }
  }
}

// Turns `count` scores into weights, in place; returns the sum by which they are to be divided.
float Softmax(float* scores, int64_t count) {
  Floats most = All(-INFINITY), sum = All(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) most = Max(most, Wide(scores + i, First(kLanes)));
  most = All(MaxOf(most));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats weights = Exp(Wide(scores + i, First(kLanes)) - most);
    Store(scores + i, First(kLanes), weights);
    sum = sum + weights;
  }
  return SumOf(sum);
}

// As Softmax, for kLanes lines whose scores are side by side. It sums in the order of `SumOf`, so that both agree exactly.
Floats SoftmaxOfAll(float* scores, int64_t count) {
  Floats most = All(-INFINITY), sums[kLanes];
  for (int64_t i = 0; i < count; ++i) most = Max(most, Wide(scores + i * kLanes, First(kLanes)));
  for (Floats& sum : sums) sum = All(0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const Floats weights = Exp(Wide(scores + i * kLanes, First(kLanes)) - most);
    Store(scores + i * kLanes, First(kLanes), weights);
    sums[i % kLanes] = sums[i % kLanes] + weights;
  }
  for (int64_t half = kLanes / 2; half; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return sums[0];
}

// out of the lines: the sums of values by their weights, divided by `sum`. Positions that all lines of a group see are added
// together, the others line by line: a value that a line does not see cannot reach it, even if it is not finite.
template <int kStride, typename T>
void SumsOfValues(Line* lines, int64_t num_lines, const Pool<T>& values, const Pages& pages, const T* next) {
  ForLines(num_lines, [&](auto together, int64_t from) {
    constexpr int L = together;
    int64_t begin = 0, end = std::numeric_limits<int64_t>::max();
    for (int64_t l = from; l < from + L; ++l) {
      std::fill_n(lines[l].out, values.width, 0.0f);
      begin = std::max(begin, lines[l].least);
      end = std::min(end, lines[l].position + 1);
    }
    end = std::max(begin, end);
    for (int64_t l = from; l < from + L; ++l) {
      AddValues<1, kStride>(lines + l, values, pages, next, lines[l].least, std::min(begin, lines[l].position + 1));
    }
    AddValues<L, kStride>(lines + from, values, pages, next, begin, end);
    for (int64_t l = from; l < from + L; ++l) {
      AddValues<1, kStride>(lines + l, values, pages, next, end, lines[l].position + 1);
    }
    for (int64_t l = from; l < from + L; ++l) {
      for (int64_t o = 0; o < values.width; ++o) lines[l].out[o] /= lines[l].sum;
    }
  });
}

// Attention of the lines of one row that share head `pages.head` of the cache: kLanes at a time, then the rest.
template <typename T>
void AttendTogether(Line* lines, int64_t num_lines, Pages pages, const Pool<T>& keys, const Pool<T>& values,
                    const Scores& how) {
  if (!num_lines) return;
  pages.least = lines[0].least, pages.last = lines[0].position;
  for (int64_t l = 1; l < num_lines; ++l) {
    pages.least = std::min(pages.least, lines[l].least);
    pages.last = std::max(pages.last, lines[l].position);
  }
  pages.first_page = pages.least / pages.size, pages.end_page = pages.last / pages.size + 1;
  const int64_t count = pages.Place(pages.end_page);
  const T* const next = keys.At(pages.RowOf(pages.least) + pages.size);  // the keys of the next head
  thread_local std::vector<float> room;
  room.resize(kLanes * count + 16);
  auto* const aligned = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
  const auto scaled = [&](int64_t n, int64_t s) { return values.scales[pages.Row(n) + s]; };
  for (; num_lines >= kLanes; lines += kLanes, num_lines -= kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lines[l].weights = aligned + l;
    ScoresOfAll(lines, keys, pages, how);
    alignas(64) float sums[kLanes];
    Store(sums, First(kLanes), SoftmaxOfAll(aligned, count));
    for (int64_t l = 0; l < kLanes; ++l) lines[l].sum = sums[l];
    for (int64_t n = pages.first_page; values.scales && n < pages.end_page; ++n) {
      for (int64_t s = 0; s < pages.size; ++s) {
        float* const own = aligned + (pages.Place(n) + s) * kLanes;
        Store(own, First(kLanes), Wide(own, First(kLanes)) * All(scaled(n, s)));
      }
    }
    SumsOfValues<kLanes>(lines, kLanes, values, pages, next);
  }
  for (int64_t l = 0; l < num_lines; ++l) lines[l].weights = aligned + l * count;
  ScoresOf(lines, num_lines, keys, values, pages, how);
  for (int64_t l = 0; l < num_lines; ++l) {
    lines[l].sum = Softmax(lines[l].weights, count);
    for (int64_t n = pages.first_page; values.scales && n < pages.end_page; ++n) {
      float* const own = lines[l].weights + pages.Place(n);
      for (int64_t s = 0; s < pages.size; ++s) own[s] *= scaled(n, s);
    }
  }
  SumsOfValues<1>(lines, num_lines, values, pages, next);
}

template <typename T>
void Attend(ffi::ThreadPool& pool, const float* q, const int32_t* positions, const int32_t* tables, Pool<T> keys,
            Pool<T> values, Sizes sizes, Scores how, float* out) {
  const int64_t together = sizes.num_heads / sizes.num_kv_heads, padded = Ceil(sizes.page, kLanes) * kLanes;
  const int64_t block = Ceil(kBlockLines, together), blocks = Ceil(sizes.length, block);
  InParallel(pool, sizes.num_rows * sizes.num_kv_heads * blocks, [=](int64_t i) {
    const int64_t row = i / blocks / sizes.num_kv_heads, head = i / blocks % sizes.num_kv_heads;
    const int64_t begin = i % blocks * block, end = std::min(sizes.length, begin + block);
    thread_local std::vector<Line> lines;
    lines.clear();
    for (int64_t n = row * sizes.length + begin; n < row * sizes.length + end; ++n) {
      const int64_t at = n * sizes.num_heads + head * together, position = positions[n];
      if (position < 0) {  // nobody's
        std::fill_n(out + at * values.width, together * values.width, 0.0f);
        continue;
      }
      const int64_t chunk = how.chunked ? position / how.window * how.window : 0;
      const int64_t least = std::max(chunk, how.window ? position - how.window + 1 : 0);
      for (int64_t g = at; g < at + together; ++g) {
        lines.push_back({q + g * keys.width, out + g * values.width, position, least, nullptr, 0.0f});
      }
    }
    const Pages pages{tables + row * sizes.pages_of_row, head, sizes.num_kv_heads, sizes.page, padded};
    AttendTogether(lines.data(), lines.size(), pages, keys, values, how);
  });
}

// out f32[R, Q, N, O] of q f32[R, Q, N, H], positions i32[R, Q], tables i32[R, P] and the pools k[B, K, S, H] and
// v[B, K, S, O]: f32, the bits of bf16, or int8 followed by their scales f32[B, K, S].
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> positions,
                     ffi::Buffer<ffi::S32> tables, ffi::RemainingArgs pools, ffi::ResultBuffer<ffi::F32> out, float scale,
                     float softcap, int64_t window, int64_t chunked) {
  const bool has_scales = pools.size() == 4;
  if (!has_scales && pools.size() != 2) return ffi::Error::InvalidArgument("two pools are needed, or two with scales");
  const auto k = *pools.get<ffi::AnyBuffer>(0), v = *pools.get<ffi::AnyBuffer>(has_scales ? 2 : 1);
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions();
  const Sizes sizes{of_q[0], of_q[1], of_q[2], of_k[1], of_k[2], tables.dimensions()[1]};
  if (of_k[3] != of_q[3] || sizes.num_heads % sizes.num_kv_heads) {
    return ffi::Error::InvalidArgument("the sizes of q and k do not fit");
  }
  const Scores how{scale, softcap, window, chunked != 0};
  const auto attend = [&](auto number) {
    using T = decltype(number);
    const auto scales = [&](int i) { return has_scales ? pools.get<ffi::Buffer<ffi::F32>>(i)->typed_data() : nullptr; };
    Attend<T>(pool, q.typed_data(), positions.typed_data(), tables.typed_data(),
              {static_cast<const T*>(k.untyped_data()), scales(1), of_k[3]},
              {static_cast<const T*>(v.untyped_data()), scales(3), of_v[3]}, sizes, how, out->typed_data());
    return ffi::Error::Success();
  };
  if (has_scales && k.element_type() == ffi::S8) return attend(int8_t());
  if (!has_scales && k.element_type() == ffi::U16) return attend(uint16_t());
  if (!has_scales && k.element_type() == ffi::F32) return attend(0.0f);
  return ffi::Error::InvalidArgument("there is no attention over pools of this type");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(widened_product, WidenedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_product, GroupedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("rounds"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(in_panels, InPanels,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_of_panels, RowsOfPanels,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(once, Once, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunked"));
