// Products of rows with weights in float32, bf16 and int8, and attention over a cache of pages,
// for x86 with AVX512-BF16 and AVX512-VNNI.
//
// Called by XLA through its foreign function interface, and run on its threads; see native.py. Weights w[O, I]
// lie in panels. A number of the result is summed in the order of I: it depends on its row and its column alone,
// never on how many others there are.

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

// 16 numbers in float32; zero where there are none.
__m512 Wide(const float* at, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, at); }
__m512 Wide(const uint16_t* at, __mmask16 lanes) {  // bf16
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at)), 16));
}
__m512 Wide(const int8_t* at, __mmask16 lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, at)));
}

__mmask16 First(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xFFFF : count > 0 ? (1u << count) - 1 : 0);
}

// Kinds of products. kTogether: numbers that one instruction sums into each of its 16 lanes, 32 bits of them.

// What is multiplied as it is, and summed in float32.
template <typename T>
struct Plain {
  using Number = T;
  static constexpr int64_t kTogether = 4 / sizeof(T);

  struct Row {};  // what a row of x has beside its numbers

  static __m512i Weight(__m512i w) { return w; }
  static __m512 Result(__m512 sum, Row) { return sum; }

  static Row Prepare(const T* from, int64_t size, T* to) {
    std::memcpy(to, from, size * sizeof(T));
    return {};
  }
};

struct Float : Plain<float> {
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
  }
};

struct Bf16 : Plain<uint16_t> {
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
};

// int8 by what is made int8 with a scale for each row, summed in int32.
struct Int8 {
  using Number = int8_t;
  static constexpr int64_t kTogether = 4;

  struct Row {
    float scale;
    int32_t excess;  // of a sum, since weights are made unsigned
  };

  static __m512i Weight(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }  // w + 128
  static __m512 Dot(__m512 sum, __m512i w, __m512i x) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), w, x));
  }
  static __m512 Result(__m512 sum, Row row) {
    const __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(row.excess));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(row.scale));
  }

  // As `int8_product` of quantised.py has it: x / scale, rounded to even.
  template <typename X>
  static Row Prepare(const X* from, int64_t size, Number* to) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 is_nan = 0;
    for (int64_t k = 0; k < size; k += 16) {
      const __m512 magnitude = _mm512_abs_ps(Wide(from + k, First(size - k)));
      is_nan |= _mm512_cmp_ps_mask(magnitude, magnitude, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, magnitude);
    }
    const float largest = is_nan ? NAN : _mm512_reduce_max_ps(most), scale = std::max(largest / 127.0f, 1e-30f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 16) {
      const __m512 scaled = _mm512_div_ps(Wide(from + k, First(size - k)), _mm512_set1_ps(scale));
      const __m512i whole = _mm512_cvt_roundps_epi32(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm512_mask_cvtepi32_storeu_epi8(to + k, First(size - k), whole);
      sum = _mm512_add_epi32(sum, whole);
    }
    return {scale, 128 * _mm512_reduce_add_epi32(sum)};
  }
};

// A step is 32 bits of every row: one number in float32, four in int8. A panel is the next 16 rows of w, the last
// one fewer; its steps follow each other, each with its rows side by side: one vector, which all rows of x meet.
// So weights are read in their order, once for each 16 rows of x, from memory for the first of them and from a
// core's cache for the others.
constexpr int64_t kPanel = 16, kRows = 16;
constexpr int64_t kBlock = 2048;  // steps whose panel stays in the second cache
constexpr int64_t kAhead = 32;    // steps: else the memory waits while many rows are multiplied

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A panel in its order: steps apart by its columns' 32 bits each.
struct Panel {
  const int32_t* at;
  int64_t apart;
  __mmask16 lanes;
};

// What R rows by a panel add to their sums, in y f32[R, width] from the first to the last of `steps`.
template <typename Kind, int R>
void Tile(const int32_t* x, Panel w, int64_t steps, const typename Kind::Row* rows, int64_t num_rows, float* y,
          int64_t width, bool is_first, bool is_last) {
  __m512 sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sums[r] = is_first || r >= num_rows ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(w.lanes, y + r * width);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const __m512i ws = Kind::Weight(_mm512_maskz_loadu_epi32(w.lanes, w.at + k * w.apart));
    _mm_prefetch(w.at + (k + kAhead) * w.apart, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = Kind::Dot(sums[r], ws, _mm512_set1_epi32(x[k * R + r]));
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (r >= num_rows) break;
    _mm512_mask_storeu_ps(y + r * width, w.lanes, is_last ? Kind::Result(sums[r], rows[r]) : sums[r]);
  }
}

// Rows of x, as tiles read them: in groups, each step of all rows of a group together.
template <typename Kind>
struct Rows {
  int64_t count, of_group, steps;
  std::vector<int32_t> numbers;
  std::vector<typename Kind::Row> others;

  template <typename X>
  Rows(ffi::ThreadPool& pool, const X* x, int64_t count, int64_t size)
      : count(count), of_group(1), steps(Ceil(size, Kind::kTogether)) {
    while (of_group < std::min(count, kRows)) of_group *= 2;
    numbers.resize(num_groups() * of_group * steps);  // rows that there are not stay zero
    others.resize(num_groups() * of_group);
    const auto prepare = [this, x, size](int64_t group) {
      thread_local std::vector<int32_t> room;
      room.resize(this->steps);
      int32_t* const to = this->numbers.data() + group * this->of_group * this->steps;
      const int64_t first = group * this->of_group, num_rows = std::min(this->of_group, this->count - first);
      for (int64_t r = 0; r < num_rows; ++r) {
        auto* const own = reinterpret_cast<typename Kind::Number*>(room.data());
        this->others[first + r] = Kind::Prepare(x + (first + r) * size, size, own);
        for (int64_t k = 0; k < this->steps; ++k) to[k * this->of_group + r] = room[k];
      }
    };
    InParallel(pool, num_groups(), prepare);
  }

  int64_t num_groups() const { return Ceil(count, of_group); }
};

// Panels `begin` to `end` for all rows.
template <typename Kind>
void Panels(const Rows<Kind>& rows, const int32_t* w, float* y, int64_t width, int64_t begin, int64_t end) {
  const auto tile = rows.of_group == 16  ? Tile<Kind, 16>
                    : rows.of_group == 8 ? Tile<Kind, 8>
                    : rows.of_group == 4 ? Tile<Kind, 4>
                    : rows.of_group == 2 ? Tile<Kind, 2>
                                         : Tile<Kind, 1>;
  for (int64_t from = 0; from < rows.steps; from += kBlock) {
    const int64_t steps = std::min(kBlock, rows.steps - from);
    for (int64_t first = begin * kPanel; first < std::min(width, end * kPanel); first += kPanel) {
      const int64_t columns = std::min(kPanel, width - first);
      const Panel panel{w + first * rows.steps + from * columns, columns, First(columns)};
      for (int64_t row = 0; row < rows.count; row += rows.of_group) {
        tile(rows.numbers.data() + row * rows.steps + from * rows.of_group, panel, steps, rows.others.data() + row,
             rows.count - row, y + row * width + first, width, from == 0, from + steps == rows.steps);
      }
    }
  }
}

template <typename Kind, typename X>
void Multiply(ffi::ThreadPool& pool, const X* x, const int32_t* w, float* y, int64_t num_rows, int64_t size,
              int64_t width) {
  const Rows<Kind> rows(pool, x, num_rows, size);
  // Eight parts for each thread, since some begin late.
  const int64_t panels = Ceil(width, kPanel), part = Ceil(panels, 8 * std::max<int64_t>(1, pool.num_threads()));
  InParallel(pool, Ceil(panels, part), [=, &rows](int64_t i) {
    Panels<Kind>(rows, w, y, width, i * part, std::min(panels, (i + 1) * part));
  });
}

// The steps of a row of w[O, I], which must be whole; none where they are not.
int64_t StepsOf(const ffi::AnyBuffer& w) {
  const auto sizes = w.dimensions();
  if (sizes.size() != 2 || sizes[0] == 0) return 0;
  const int64_t bytes = static_cast<int64_t>(w.size_bytes()) / sizes[0];
  return bytes % 4 ? 0 : bytes / 4;
}

// y f32[R, O] of x[R, I] and w[O, I] in panels: both f32 or both bf16, or w int8 and x f32 or bf16.
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  const auto sizes = x.dimensions(), of_w = w.dimensions();
  if (!StepsOf(w) || sizes.size() != 2 || sizes[1] != of_w[1]) {
    return ffi::Error::InvalidArgument("x[R, I] and w[O, I] of whole steps are needed");
  }
  const auto multiply = [&](auto kind, auto number) {
    Multiply<decltype(kind)>(pool, static_cast<const decltype(number)*>(x.untyped_data()),
                             static_cast<const int32_t*>(w.untyped_data()), y->typed_data(), sizes[0], sizes[1],
                             of_w[0]);
    return ffi::Error::Success();
  };
  const auto of_x = x.element_type(), of_weights = w.element_type();
  if (of_weights == ffi::F32 && of_x == ffi::F32) return multiply(Float(), float());
  if (of_weights == ffi::BF16 && of_x == ffi::BF16) return multiply(Bf16(), uint16_t());
  if (of_weights == ffi::S8 && of_x == ffi::BF16) return multiply(Int8(), uint16_t());
  if (of_weights == ffi::S8 && of_x == ffi::F32) return multiply(Int8(), float());
  return ffi::Error::InvalidArgument("of these types there is no product");
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

// Attention of queries over the pages of their sequences.

// The sums of 16 vectors of 16 lanes: lanes i and i + 8, then i and i + 4, i + 2, i + 1. Inlined, since vectors whose
// address is given away are not kept in registers.
[[gnu::always_inline]] inline __m512 Sums(const __m512* v) {
  __m512 eights[8], fours[4], twos[2];
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
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xDD));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

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
};

struct Scores {
  float scale, softcap;  // no cap where 0
  int64_t window;        // positions that a query sees; all before it where 0
  bool chunked;          // of those the ones of its own chunk of so many
};

struct Sizes {
  int64_t num_rows, length, num_heads, num_kv_heads, page, pages_of_row;
};

// The pages of a row from the first to the last that its queries see, and where their numbers lie.
struct Pages {
  const int32_t* table;
  int64_t head, num_heads, size, padded, first, last;

  int64_t Row(int64_t n) const { return (static_cast<int64_t>(table[n]) * num_heads + head) * size; }  // of the pool
  int64_t Place(int64_t n) const { return (n - first) * padded; }  // among a line's weights
};

// One query of one head. Those that meet the same keys are attended with side by side: a key is then read once for
// kLines of them. What is summed for a line, and in which order, does not depend on those beside it.
struct Line {
  const float* q;
  float* out;
  int64_t position, least;  // the last and the first position that it sees
  float* weights;           // of `padded` numbers for each page: scores first
  float sum;                // by which weights are to be divided
};

constexpr int64_t kLines = 4, kBlockLines = 16;

// tile f32[L, 16]: L lines by 16 keys or fewer, from `row` of the pool on.
template <int L, typename T>
void Products(const Line* lines, const Pool<T>& keys, int64_t row, int64_t count, float* tile) {
  constexpr int kKeys = 16 / L;
  for (int64_t begin = 0; begin < count; begin += kKeys) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t h = 0; h < keys.width; h += 16) {
      const __mmask16 lanes = First(keys.width - h);
      __m512 some[L];
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) some[l] = _mm512_maskz_loadu_ps(lanes, lines[l].q + h);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const int64_t own = row + std::min<int64_t>(begin + k, count - 1);
        const __m512 key = Wide(keys.values + own * keys.width + h, lanes);
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l) sums[l * kKeys + k] = _mm512_fmadd_ps(some[l], key, sums[l * kKeys + k]);
      }
    }
    alignas(64) float each[16];
    _mm512_store_ps(each, Sums(sums));
    for (int l = 0; l < L; ++l) std::memcpy(tile + l * 16 + begin, each + l * kKeys, kKeys * sizeof(float));
  }
}

__m512 Capped(__m512 scores, float softcap) {
  alignas(64) float each[16];
  _mm512_store_ps(each, scores);
  for (float& score : each) score = softcap * std::tanh(score / softcap);
  return _mm512_load_ps(each);
}

// out of L lines += the values from position `begin` to `end` by their weights, in their order.
template <int L, typename T>
void AddValues(const Line* lines, const Pool<T>& values, const Pages& pages, int64_t begin, int64_t end) {
  constexpr int kWide = 4;
  if (begin >= end) return;
  for (int64_t o = 0; o < values.width; o += 16 * kWide) {
    __mmask16 lanes[kWide];
    __m512 sums[L][kWide];
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) {
      lanes[i] = First(values.width - o - 16 * i);
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) sums[l][i] = _mm512_maskz_loadu_ps(lanes[i], lines[l].out + o + 16 * i);
    }
    for (int64_t s = begin; s < end;) {
      const int64_t n = s / pages.size, inside = s - n * pages.size, until = std::min(end, (n + 1) * pages.size);
      const T* at = values.values + (pages.Row(n) + inside) * values.width + o;
      const int64_t weight = pages.Place(n) + inside;
      for (int64_t i = 0; i < until - s; ++i, at += values.width) {
        __m512 some[kWide];
#pragma GCC unroll 4
        for (int j = 0; j < kWide; ++j) some[j] = Wide(at + 16 * j, lanes[j]);
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l) {
          const __m512 by = _mm512_set1_ps(lines[l].weights[weight + i]);
#pragma GCC unroll 4
          for (int j = 0; j < kWide; ++j) sums[l][j] = _mm512_fmadd_ps(by, some[j], sums[l][j]);
        }
      }
      s = until;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) {
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) _mm512_mask_storeu_ps(lines[l].out + o + 16 * i, lanes[i], sums[l][i]);
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

// The scores of lines over all pages, in their `weights`.
template <typename T>
void ScoresOf(const Line* lines, int64_t num_lines, const Pool<T>& keys, const Pages& pages, const Scores& how) {
  const auto score = [&](auto together, int64_t from) {
    constexpr int L = together;
    alignas(64) float tile[L * 16];
    for (int64_t n = pages.first; n < pages.last; ++n) {
      for (int64_t s = 0; s < pages.padded; s += 16) {
        const int64_t begin = n * pages.size + s, row = pages.Row(n) + s, count = std::min<int64_t>(16, pages.size - s);
        __mmask16 seen[L], some = 0;
        for (int l = 0; l < L; ++l) {
          const Line& line = lines[from + l];
          seen[l] = First(std::min(count, line.position + 1 - begin)) & ~First(line.least - begin);
          some |= seen[l];
        }
        if (some) Products<L>(lines + from, keys, row, count, tile);
        for (int l = 0; l < L; ++l) {
          __m512 scores = _mm512_mul_ps(_mm512_load_ps(tile + l * 16), _mm512_set1_ps(how.scale));
          if (keys.scales) scores = _mm512_mul_ps(scores, _mm512_maskz_loadu_ps(First(count), keys.scales + row));
          if (how.softcap > 0) scores = Capped(scores, how.softcap);
          scores = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen[l], scores);
          _mm512_storeu_ps(lines[from + l].weights + pages.Place(n) + s, scores);
        }
      }
    }
  };
  ForLines(num_lines, score);
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

// Lines of one row that share head `pages.head` of the cache.
template <typename T>
void AttendTogether(Line* lines, int64_t num_lines, Pages pages, const Pool<T>& keys, const Pool<T>& values,
                    const Scores& how) {
  if (!num_lines) return;
  int64_t last = 0;
  pages.first = lines[0].least / pages.size;
  for (int64_t l = 0; l < num_lines; ++l) {
    pages.first = std::min(pages.first, lines[l].least / pages.size);
    last = std::max(last, lines[l].position);
  }
  pages.last = last / pages.size + 1;
  const int64_t count = pages.Place(pages.last);
  thread_local std::vector<float> room;
  room.resize(num_lines * count);
  for (int64_t l = 0; l < num_lines; ++l) lines[l].weights = room.data() + l * count;
  ScoresOf(lines, num_lines, keys, pages, how);
  for (int64_t l = 0; l < num_lines; ++l) {
    lines[l].sum = Softmax(lines[l].weights, count);
    for (int64_t n = pages.first; values.scales && n < pages.last; ++n) {
      float* const own = lines[l].weights + pages.Place(n);
      for (int64_t s = 0; s < pages.size; ++s) own[s] *= values.scales[pages.Row(n) + s];
    }
    std::fill_n(lines[l].out, values.width, 0.0f);
  }
  // What each sees and not all of them is left to each: a key that a line does not see cannot reach it, also if
  // its values are not finite.
  const auto add = [&](auto together, int64_t from) {
    constexpr int L = together;
    int64_t begin = 0, end = std::numeric_limits<int64_t>::max();
    for (int64_t l = from; l < from + L; ++l) {
      begin = std::max(begin, lines[l].least);
      end = std::min(end, lines[l].position + 1);
    }
    end = std::max(begin, end);
    for (int64_t l = from; l < from + L; ++l) {
      AddValues<1>(lines + l, values, pages, lines[l].least, std::min(begin, lines[l].position + 1));
    }
    AddValues<L>(lines + from, values, pages, begin, end);
    for (int64_t l = from; l < from + L; ++l) AddValues<1>(lines + l, values, pages, end, lines[l].position + 1);
  };
  ForLines(num_lines, add);
  for (int64_t l = 0; l < num_lines; ++l) {
    for (int64_t o = 0; o < values.width; ++o) lines[l].out[o] /= lines[l].sum;
  }
}

template <typename T>
void Attend(ffi::ThreadPool& pool, const float* q, const int32_t* positions, const int32_t* tables, Pool<T> keys,
            Pool<T> values, Sizes sizes, Scores how, float* out) {
  const int64_t together = sizes.num_heads / sizes.num_kv_heads, padded = Ceil(sizes.page, 16) * 16;
  const int64_t block = std::max<int64_t>(1, kBlockLines / together), blocks = Ceil(sizes.length, block);
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
    const Pages pages{tables + row * sizes.pages_of_row, head, sizes.num_kv_heads, sizes.page, padded, 0, 0};
    AttendTogether(lines.data(), lines.size(), pages, keys, values, how);
  });
}

// out f32[R, Q, N, O] of q f32[R, Q, N, H], positions i32[R, Q], tables i32[R, P] and the pools k[B, K, S, H] and
// v[B, K, S, O]: f32, or int8 followed by their scales f32[B, K, S].
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> positions,
                     ffi::Buffer<ffi::S32> tables, ffi::RemainingArgs pools, ffi::ResultBuffer<ffi::F32> out, float scale,
                     float softcap, int64_t window, int64_t chunked) {
  const bool is_narrow = pools.size() == 4;
  if (!is_narrow && pools.size() != 2) return ffi::Error::InvalidArgument("two pools are needed, or two with scales");
  const auto k = *pools.get<ffi::AnyBuffer>(0), v = *pools.get<ffi::AnyBuffer>(is_narrow ? 2 : 1);
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions();
  const Sizes sizes{of_q[0], of_q[1], of_q[2], of_k[1], of_k[2], tables.dimensions()[1]};
  if (of_k[3] != of_q[3] || sizes.num_heads % sizes.num_kv_heads) {
    return ffi::Error::InvalidArgument("the sizes of q and k do not fit");
  }
  const Scores how{scale, softcap, window, chunked != 0};
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(in_panels, InPanels,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_of_panels, RowsOfPanels,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());
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
