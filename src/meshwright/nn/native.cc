// Products of few rows with weights in float32, bf16 and int8, and attention of few queries over a cache of pages,
// for x86 with AVX512-BF16 and AVX512-VNNI.
//
// Called by XLA through its foreign function interface, and run on its threads; see native.py. Weights lie
// as w[O, I], what is summed over last. A number of the result is a sum of 16 lanes, each in the order of I,
// added in one tree: it depends on its row and its column alone, never on how many others there are.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
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

// The sums of 16 vectors of 16 lanes: lanes i and i + 8, then i and i + 4, i + 2, i + 1.
template <typename Kind>
__m512 Sums(const __m512* v) {
  __m512 eights[8], fours[4], twos[2];
  for (int i = 0; i < 8; ++i) {
    eights[i] = Kind::Add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                          _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
  }
  for (int i = 0; i < 4; ++i) {
    fours[i] = Kind::Add(_mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0xDD));
  }
  for (int i = 0; i < 2; ++i) {
    twos[i] = Kind::Add(_mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44),
                        _mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xEE));
  }
  const __m512 sums = Kind::Add(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xDD));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

struct Float {
  using Number = float;
  static constexpr int64_t kLanes = 16;  // numbers of a vector

  struct Row {};  // what a row of x has beside its numbers

  static __m512i Some(const Number* at, int64_t count) {
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(0xFFFFu >> (kLanes - count), at));
  }
  static __m512i Weight(__m512i w) { return w; }
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
  }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static float Result(float sum, Row) { return sum; }

  static Row Prepare(const Number* from, int64_t size, int64_t apart, Number* to) {
    for (int64_t k = 0; k < size; k += kLanes, to += apart) {
      _mm512_store_si512(to, Some(from + k, std::min(kLanes, size - k)));
    }
    return {};
  }
};

// bf16 by bf16, summed in float32.
struct Bf16 {
  using Number = uint16_t;
  static constexpr int64_t kLanes = 32;  // numbers of a vector

  struct Row {};  // what a row of x has beside its numbers

  static __m512i Some(const Number* at, int64_t count) {
    return _mm512_maskz_loadu_epi16(~0u >> (kLanes - count), at);
  }
  static __m512i Weight(__m512i w) { return w; }
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static float Result(float sum, Row) { return sum; }

  static Row Prepare(const Number* from, int64_t size, int64_t apart, Number* to) {
    for (int64_t k = 0; k < size; k += kLanes, to += apart) {
      _mm512_store_si512(to, Some(from + k, std::min(kLanes, size - k)));
    }
    return {};
  }
};

// int8 by what is made int8 with a scale for each row, summed in int32.
struct Int8 {
  using Number = int8_t;
  static constexpr int64_t kLanes = 64;

  struct Row {
    float scale;
    int32_t excess;  // of a sum, since weights are made unsigned
  };

  static __m512i Some(const Number* at, int64_t count) {
    return _mm512_maskz_loadu_epi8(~0ull >> (kLanes - count), at);
  }
  static __m512i Weight(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }  // w + 128
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), w, x));
  }
  static __m512 Add(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static float Result(float sum, Row row) {
    int32_t whole;
    std::memcpy(&whole, &sum, sizeof whole);
    return static_cast<float>(whole - row.excess) * row.scale;
  }

  static float Wide(float x) { return x; }
  static float Wide(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }

  // As `int8_product` of quantised.py has it: x / scale, rounded to even.
  template <typename X>
  static Row Prepare(const X* from, int64_t size, int64_t apart, Number* to) {
    float largest = 0;
    for (int64_t k = 0; k < size; ++k) {
      const float magnitude = std::fabs(Wide(from[k]));
      largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    }
    const float scale = std::max(largest / 127.0f, 1e-30f);
    int32_t sum = 0;
    for (int64_t k = 0; k < size; k += kLanes, to += apart) {
      for (int64_t i = 0; i < kLanes; ++i) {
        const int32_t number = k + i < size ? static_cast<int32_t>(std::nearbyint(Wide(from[k + i]) / scale)) : 0;
        to[i] = static_cast<int8_t>(number);
        sum += to[i];
      }
    }
    return {scale, 128 * sum};
  }
};

constexpr int64_t kGroup = 4;  // rows that are multiplied together

// The sums of R rows by C columns, at r * C + c. x: the rows side by side, vector by vector.
template <typename Kind, int R, int C>
__m512 Tile(const typename Kind::Number* x, const typename Kind::Number* w, int64_t size) {
  constexpr int64_t kLanes = Kind::kLanes;
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  const auto step = [&](const __m512i* ws, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i xs = _mm512_load_si512(x + k * R + r * kLanes);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sums[r * C + c] = Kind::Dot(sums[r * C + c], ws[c], xs);
    }
  };
  int64_t k = 0;
  __m512i ws[C];
  for (; k + kLanes <= size; k += kLanes) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      ws[c] = Kind::Weight(_mm512_loadu_si512(w + c * size + k));
      _mm_prefetch(w + (C + c) * size + k, _MM_HINT_T0);  // of the next tile
    }
    step(ws, k);
  }
  if (k < size) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) ws[c] = Kind::Weight(Kind::Some(w + c * size + k, size - k));
    step(ws, k);
  }
  return Sums<Kind>(sums);
}

template <typename Kind, int R, int C>
void Put(const typename Kind::Number* x, const typename Kind::Number* w, int64_t size,
         const typename Kind::Row* rows, float* y, int64_t width) {
  alignas(64) float sums[16];
  _mm512_store_ps(sums, Tile<Kind, R, C>(x, w, size));
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) y[r * width + c] = Kind::Result(sums[r * C + c], rows[r]);
  }
}

// Columns `begin` to `end` of one group of R rows, C at a time.
template <typename Kind, int R, int C>
void Columns(const typename Kind::Number* x, const typename Kind::Number* w, int64_t size,
             const typename Kind::Row* rows, float* y, int64_t width, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + C <= end; o += C) Put<Kind, R, C>(x, w + o * size, size, rows, y + o, width);
  for (; o < end; ++o) Put<Kind, R, 1>(x, w + o * size, size, rows, y + o, width);
}

template <typename Kind, typename X>
void Multiply(ffi::ThreadPool& pool, const X* x, const typename Kind::Number* w, float* y, int64_t num_rows,
              int64_t size, int64_t width) {
  using Number = typename Kind::Number;
  using Row = typename Kind::Row;
  constexpr int64_t kLanes = Kind::kLanes;
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes, groups = (num_rows + kGroup - 1) / kGroup;
  thread_local std::vector<__m512i> room;
  thread_local std::vector<Row> row_room;
  room.resize(num_rows * padded / kLanes);
  row_room.resize(num_rows);
  Number* const packed = reinterpret_cast<Number*>(room.data());
  Row* const rows = row_room.data();
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t first = r / kGroup * kGroup, together = std::min(kGroup, num_rows - first);
    rows[r] = Kind::Prepare(x + r * size, size, together * kLanes, packed + first * padded + (r - first) * kLanes);
  }
  // Eight parts for each thread, since some begin late, of columns that stay in a core's cache.
  const int64_t fitting = (256 << 10) / static_cast<int64_t>(size * sizeof(Number));
  const int64_t even = width / (8 * std::max<int64_t>(1, pool.num_threads()));
  const int64_t part = std::max<int64_t>(16, std::min(fitting, even + 15) / 16 * 16);
  InParallel(pool, (width + part - 1) / part, [=](int64_t i) {
    const int64_t begin = i * part, end = std::min(width, begin + part);
    if (num_rows == 1) return Columns<Kind, 1, 8>(packed, w, size, rows, y, width, begin, end);
    if (num_rows == 2) return Columns<Kind, 2, 8>(packed, w, size, rows, y, width, begin, end);
    for (int64_t o = begin; o < end; o += 4) {  // which stay in the first cache for all rows
      const int64_t until = std::min(end, o + 4);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t r = g * kGroup;
        const auto columns = num_rows - r >= 4   ? Columns<Kind, 4, 4>
                             : num_rows - r == 3 ? Columns<Kind, 3, 4>
                             : num_rows - r == 2 ? Columns<Kind, 2, 4>
                                                 : Columns<Kind, 1, 4>;
        columns(packed + r * padded, w, size, rows + r, y + r * width, width, o, until);
      }
    }
  });
}

// y f32[R, O] of x[R, I] and w[O, I]: both f32 or both bf16, or w int8 and x f32 or bf16.
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  const auto sizes = x.dimensions(), of_w = w.dimensions();
  if (sizes.size() != 2 || of_w.size() != 2 || sizes[1] != of_w[1]) {
    return ffi::Error::InvalidArgument("x[R, I] and w[O, I] are needed");
  }
  const int64_t rows = sizes[0], size = sizes[1], width = of_w[0];
  const void *xs = x.untyped_data(), *ws = w.untyped_data();
  float* ys = y->typed_data();
  const auto of_x = x.element_type(), of_weights = w.element_type();
  if (of_weights == ffi::F32 && of_x == ffi::F32) {
    Multiply<Float>(pool, static_cast<const float*>(xs), static_cast<const float*>(ws), ys, rows, size, width);
  } else if (of_weights == ffi::BF16 && of_x == ffi::BF16) {
    Multiply<Bf16>(pool, static_cast<const uint16_t*>(xs), static_cast<const uint16_t*>(ws), ys, rows, size, width);
  } else if (of_weights == ffi::S8 && of_x == ffi::BF16) {
    Multiply<Int8>(pool, static_cast<const uint16_t*>(xs), static_cast<const int8_t*>(ws), ys, rows, size, width);
  } else if (of_weights == ffi::S8 && of_x == ffi::F32) {
    Multiply<Int8>(pool, static_cast<const float*>(xs), static_cast<const int8_t*>(ws), ys, rows, size, width);
  } else {
    return ffi::Error::InvalidArgument("of these types there is no product");
  }
  return ffi::Error::Success();
}

// Attention of few queries over the pages of their sequences.

__m512 Wide(const float* at, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, at); }
__m512 Wide(const int8_t* at, __mmask16 lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, at)));
}

__mmask16 First(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1u << count) - 1); }

// e^x for x <= 0, to two units in the last place.
__m512 Exp(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts (Cephes)
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  }
  return _mm512_scalef_ps(sum, whole);
}

// One layer's pool of keys or values: [pages, heads, size, width], in int8 with a scale for each [..., size].
template <typename T>
struct Pool {
  const T* values;
  const float* scales;
  int64_t width;

  float Scale(int64_t row) const { return scales ? scales[row] : 1.0f; }
};

struct Scores {
  float scale, softcap;  // no cap where 0
  int64_t window;        // positions that a query sees; all before it where 0
};

struct Sizes {
  int64_t num_rows, length, num_heads, num_kv_heads, page, pages_of_row;
};

// The scores of q over 16 keys or fewer, from `row` of the pool on.
template <typename T>
__m512 ScoresOf(const float* q, const Pool<T>& keys, int64_t row, int64_t count, const Scores& how) {
  __m512 sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t h = 0; h < keys.width; h += 16) {
    const __mmask16 lanes = First(keys.width - h);
    const __m512 some = _mm512_maskz_loadu_ps(lanes, q + h);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int64_t own = row + std::min<int64_t>(i, count - 1);
      sums[i] = _mm512_fmadd_ps(some, Wide(keys.values + own * keys.width + h, lanes), sums[i]);
    }
  }
  __m512 scores = _mm512_mul_ps(Sums<Bf16>(sums), _mm512_set1_ps(how.scale));
  if (keys.scales) scores = _mm512_mul_ps(scores, _mm512_maskz_loadu_ps(First(count), keys.scales + row));
  if (how.softcap > 0) {
    alignas(64) float each[16];
    _mm512_store_ps(each, scores);
    for (float& score : each) score = how.softcap * std::tanh(score / how.softcap);
    scores = _mm512_load_ps(each);
  }
  return scores;
}

// The weights of `count` scores, in place; what they are to be divided by.
float Softmax(float* scores, int64_t count) {
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
  most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 weights = Exp(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most));
    _mm512_storeu_ps(scores + i, weights);
    sum = _mm512_add_ps(sum, weights);
  }
  return _mm512_reduce_add_ps(sum);
}

// out += the values of `count` keys from `row` of the pool on, by their weights.
template <typename T>
void AddValues(const float* weights, const Pool<T>& values, int64_t row, int64_t count, float* out) {
  for (int64_t o = 0; o < values.width; o += 16) {
    const __mmask16 lanes = First(values.width - o);
    __m512 sums[4] = {_mm512_maskz_loadu_ps(lanes, out + o)};
    for (int i = 1; i < 4; ++i) sums[i] = _mm512_setzero_ps();
    const T* const at = values.values + row * values.width + o;
    int64_t s = 0;
    const auto add = [&](int i) __attribute__((always_inline)) {
      const __m512 weight = _mm512_set1_ps(weights[s + i] * values.Scale(row + s + i));
      sums[i] = _mm512_fmadd_ps(weight, Wide(at + (s + i) * values.width, lanes), sums[i]);
    };
    for (; s + 4 <= count; s += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) add(i);
    }
    for (; s < count; ++s) add(0);
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    _mm512_mask_storeu_ps(out + o, lanes, sum);
  }
}

// One query of the heads that share head `head` of the cache.
template <typename T>
void AttendOnce(const float* q, int64_t position, const int32_t* table, const Pool<T>& keys, const Pool<T>& values,
                const Sizes& sizes, const Scores& how, int64_t head, float* out) {
  const int64_t together = sizes.num_heads / sizes.num_kv_heads, size = sizes.page, padded = (size + 15) / 16 * 16;
  std::fill_n(out, together * values.width, 0.0f);
  if (position < 0) return;  // nobody's
  const int64_t least = how.window ? std::max<int64_t>(0, position - how.window + 1) : 0;
  const int64_t first = least / size, num_pages = position / size - first + 1, count = num_pages * padded;
  thread_local std::vector<float> room;
  room.resize(together * (count + 1));
  float* const scores = room.data();
  float* const sums = scores + together * count;
  const auto row_of = [&](int64_t n) { return (static_cast<int64_t>(table[first + n]) * sizes.num_kv_heads + head) * size; };
  for (int64_t n = 0; n < num_pages; ++n) {
    const int64_t begin = (first + n) * size;
    for (int64_t s = 0; s < padded; s += 16) {
      const auto seen = static_cast<__mmask16>(First(std::max<int64_t>(0, std::min(size - s, position + 1 - begin - s))) &
                                               ~First(std::max<int64_t>(0, least - begin - s)));
      for (int64_t g = 0; g < together; ++g) {
        const __m512 some = seen ? ScoresOf(q + g * keys.width, keys, row_of(n) + s, std::min<int64_t>(16, size - s), how)
                                 : _mm512_setzero_ps();
        _mm512_storeu_ps(scores + g * count + n * padded + s, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, some));
      }
    }
  }
  for (int64_t g = 0; g < together; ++g) sums[g] = Softmax(scores + g * count, count);
  for (int64_t n = 0; n < num_pages; ++n) {
    const int64_t begin = (first + n) * size, from = std::max<int64_t>(0, least - begin);
    const int64_t until = std::min(size, position + 1 - begin);
    for (int64_t g = 0; g < together; ++g) {
      AddValues(scores + g * count + n * padded + from, values, row_of(n) + from, until - from, out + g * values.width);
    }
  }
  for (int64_t g = 0; g < together; ++g) {
    for (int64_t o = 0; o < values.width; ++o) out[g * values.width + o] /= sums[g];
  }
}

template <typename T>
void Attend(ffi::ThreadPool& pool, const float* q, const int32_t* positions, const int32_t* tables, Pool<T> keys,
            Pool<T> values, Sizes sizes, Scores how, float* out) {
  InParallel(pool, sizes.num_rows * sizes.num_kv_heads, [=](int64_t i) {
    const int64_t row = i / sizes.num_kv_heads, head = i % sizes.num_kv_heads;
    const int64_t together = sizes.num_heads / sizes.num_kv_heads;
    for (int64_t n = row * sizes.length; n < (row + 1) * sizes.length; ++n) {
      const int64_t at = n * sizes.num_heads + head * together;
      AttendOnce(q + at * keys.width, positions[n], tables + row * sizes.pages_of_row, keys, values, sizes, how, head,
                 out + at * values.width);
    }
  });
}

// out f32[R, Q, N, O] of q f32[R, Q, N, H], positions i32[R, Q], tables i32[R, P] and the pools k[B, K, S, H] and
// v[B, K, S, O]: f32, or int8 followed by their scales f32[B, K, S].
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> positions,
                     ffi::Buffer<ffi::S32> tables, ffi::RemainingArgs pools, ffi::ResultBuffer<ffi::F32> out, float scale,
                     float softcap, int64_t window) {
  const bool is_narrow = pools.size() == 4;
  if (!is_narrow && pools.size() != 2) return ffi::Error::InvalidArgument("two pools are needed, or two with scales");
  const auto k = *pools.get<ffi::AnyBuffer>(0), v = *pools.get<ffi::AnyBuffer>(is_narrow ? 2 : 1);
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions();
  const Sizes sizes{of_q[0], of_q[1], of_q[2], of_k[1], of_k[2], tables.dimensions()[1]};
  if (of_k[3] != of_q[3] || sizes.num_heads % sizes.num_kv_heads) {
    return ffi::Error::InvalidArgument("the sizes of q and k do not fit");
  }
  const Scores how{scale, softcap, window};
  if (is_narrow) {
    const auto scales = [&](int i) { return pools.get<ffi::Buffer<ffi::F32>>(i)->typed_data(); };
    Attend<int8_t>(pool, q.typed_data(), positions.typed_data(), tables.typed_data(),
                   {static_cast<const int8_t*>(k.untyped_data()), scales(1), of_k[3]},
                   {static_cast<const int8_t*>(v.untyped_data()), scales(3), of_v[3]}, sizes, how, out->typed_data());
  } else {
    Attend<float>(pool, q.typed_data(), positions.typed_data(), tables.typed_data(),
                  {static_cast<const float*>(k.untyped_data()), nullptr, of_k[3]},
                  {static_cast<const float*>(v.untyped_data()), nullptr, of_v[3]}, sizes, how, out->typed_data());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
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
                                  .Attr<int64_t>("window"));
