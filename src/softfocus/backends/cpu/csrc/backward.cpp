// The backward. A task sums the gradients of a key head over blocks of query rows. If fewer key
// heads are packed together than there are threads, each key head has several tasks. They divide
// its blocks of rows, not its keys, so each task has its own sums of all keys. These are added in a
// fixed order, so that grad_key and grad_value depend on the number of threads but not on timing.
#include "gradients.h"
#include "parallel.h"

namespace softfocus {
namespace {

// Where one task sums the gradients of a key head. The first task of a key head sums in the result
// itself if that is float32 in whole vectors.
struct KeyHeadSums {
  // [Lk, padded_dim], [Lk, padded_value_dim]; unused if the sums are in the result itself
  Buffer<float> grad_key_scratch, grad_value_scratch;
  // [Lk, padded_dim], [Lk, padded_value_dim]
  float *grad_key = nullptr, *grad_value = nullptr;
};

// How a call is divided into tasks: `at_once` key heads are packed together. Task t of a key head
// takes the blocks t, t + tasks_per_head, t + 2 tasks_per_head, ... of each of its query heads.
struct Schedule {
  int64_t at_once, tasks_per_head, block_rows, blocks;

  Schedule(const Params& params, const TensorView& grad_bias)
      : at_once(key_heads_at_once(params, /*backward=*/true)),
        tasks_per_head(1),
        block_rows(rows_per_block(params, /*backward=*/true)),
        blocks(ceil_div(params.query_length, block_rows)) {
    // Tasks that add to the same elements of grad_bias must not run at the same time. If heads
    // share elements, at_once is 1. If rows share elements, tasks_per_head is 1.
    // Otherwise the tasks of one key head may run at the same time: they take different rows.
    bool shared_by_heads = (!grad_bias.stride[0] && params.batch > 1) || (!grad_bias.stride[1] && params.heads > 1);
    bool shared_by_rows = !grad_bias.stride[2] && params.query_length > 1;
    if (grad_bias.data && shared_by_heads) at_once = std::min<int64_t>(at_once, 1);
    if (at_once > 0 && at_once < params.threads && blocks && !(grad_bias.data && shared_by_rows))
      tasks_per_head = std::min(ceil_div(params.threads, at_once), blocks);
  }
};

// One task: every tasks_per_head-th block of rows of a key head. key_head_index counts all B * Hk.
template <typename Phi>
void run_task(const Params& params, const GradientTensors& grads, const Schedule& schedule, int64_t key_head_index,
              int64_t task, const KeyHeadData& key_data, KeyHeadSums& sums, RowGradients<Phi>& worker) {
  int64_t padded_dim = round_up(params.head_dim, W), padded_value_dim = round_up(params.value_dim, W);
  // Sets sums_at [Lk, stride] to where this task sums: the result itself, [B * Hk, Lk, dim], if the
  // layout allows, else scratch. Fills it with 0.
  auto place = [&](Buffer<float>& scratch, float*& sums_at, void* result, int64_t stride, int64_t dim) {
    bool direct = task == 0 && stride == dim && params.dtype == FLOAT32;
    if (!direct) scratch.resize(params.key_length * stride);
    sums_at = direct ? static_cast<float*>(result) + key_head_index * params.key_length * dim : scratch;
    std::fill(sums_at, sums_at + params.key_length * stride, 0.0f);
  };
  place(sums.grad_key_scratch, sums.grad_key, grads.grad_key, padded_dim, params.head_dim);
  place(sums.grad_value_scratch, sums.grad_value, grads.grad_value, padded_value_dim, params.value_dim);
  for (int64_t g = 0; g < params.group(); ++g)
    for (int64_t block_index = task; block_index < schedule.blocks; block_index += schedule.tasks_per_head)
      worker.run(key_head_index / params.key_heads, key_head_index % params.key_heads * params.group() + g,
                 block_index * schedule.block_rows, key_data, grads, sums.grad_key, sums.grad_value);
}

// Adds the sums of a key head's tasks for the keys [begin, end), at most BLOCK_K, and writes them
// in the query's dtype. With cosine similarity turns gradients of unit keys into those of keys.
inline void add_tasks(const Params& params, const GradientTensors& grads, int64_t tasks_per_head,
                      int64_t key_head_index, int64_t begin, int64_t end, const KeyHeadData& key_data,
                      KeyHeadSums* sums) {
  int64_t padded_dim = round_up(params.head_dim, W), padded_value_dim = round_up(params.value_dim, W);
  Buffer<float> scratch(params.cosine ? BLOCK_K * padded_dim : 0);  // [BLOCK_K, padded_dim]
  RowView unit_keys{nullptr, 0};
  if (params.cosine)
    unit_keys = view_keys(params, key_data, key_head_index / params.key_heads, key_head_index % params.key_heads, begin,
                          end, scratch);
  for (int64_t key = begin; key < end; ++key) {
    float *grad_key_row = sums[0].grad_key + key * padded_dim,
          *grad_value_row = sums[0].grad_value + key * padded_value_dim;
    for (int64_t s = 1; s < tasks_per_head; ++s) {
      for (int64_t d = 0; d < padded_dim; ++d) grad_key_row[d] += sums[s].grad_key[key * padded_dim + d];
      for (int64_t d = 0; d < padded_value_dim; ++d)
        grad_value_row[d] += sums[s].grad_value[key * padded_value_dim + d];
    }
    if (params.cosine)
      l2_normalise_backward(grad_key_row, unit_keys.data + (key - begin) * unit_keys.stride, key_data.key_rnorm[key],
                            params.head_dim);
    int64_t row = key_head_index * params.key_length + key;
    write_row(grads.grad_key, params.dtype, row * params.head_dim, grad_key_row, params.head_dim);
    write_row(grads.grad_value, params.dtype, row * params.value_dim, grad_value_row, params.value_dim);
  }
}

template <typename Phi>
bool backward(const Params& params, const GradientTensors& grads) {
  Schedule schedule(params, grads.grad_bias);
  int64_t at_once = schedule.at_once, tasks_per_head = schedule.tasks_per_head,
          all_key_heads = params.batch * params.key_heads;
  PerThread<RowGradients<Phi>> workers(params);
  std::vector<KeyHeadData> key_data_at_once(at_once);
  for (KeyHeadData& key_data : key_data_at_once) key_data.reserve(params, /*backward=*/true);
  std::vector<KeyHeadSums> sums(at_once * tasks_per_head);
  for (int64_t first_key_head = 0; first_key_head < all_key_heads; first_key_head += at_once) {
    int64_t n = std::min(at_once, all_key_heads - first_key_head);
    if (!pack_key_heads(params, key_data_at_once, first_key_head, n, /*backward=*/true)) return false;
    bool done = parallel_for(params.threads, n * tasks_per_head, [&](int64_t item) {
      int64_t i = item / tasks_per_head;
      run_task<Phi>(params, grads, schedule, first_key_head + i, item % tasks_per_head, key_data_at_once[i], sums[item],
                    workers.mine());
    });
    if (!done) return false;
    int64_t tiles = ceil_div(params.key_length, BLOCK_K);
    done = parallel_for(params.threads, n * tiles, [&](int64_t item) {
      int64_t i = item / tiles, begin = item % tiles * BLOCK_K, end = std::min(begin + BLOCK_K, params.key_length);
      add_tasks(params, grads, tasks_per_head, first_key_head + i, begin, end, key_data_at_once[i],
                &sums[i * tasks_per_head]);
    });
    if (!done) return false;
  }
  return true;
}

}  // namespace
}  // namespace softfocus

// Writes grad_query, grad_key and grad_value, contiguous, of the query's dtype. Adds to grad_bias,
// which the caller has set to zero; it may be absent. Writes grad_head_scale and grad_power, [B, H,
// Lq] each, unless null. Returns 0, or 1 if memory ran out; the gradients are then arbitrary.
extern "C" __attribute__((visibility("default"))) int softfocus_backward(
    const softfocus::Params* params, const softfocus::TensorView* grad_out, const softfocus::TensorView* grad_bias,
    void* grad_query, void* grad_key, void* grad_value, float* grad_head_scale, float* grad_power) {
  bool done = false;
  try {
    softfocus::GradientTensors grads{*grad_out,  grad_query,      grad_key,  grad_value,
                                     *grad_bias, grad_head_scale, grad_power};
    softfocus::with_phi(params->phi, [&](auto phi) { done = softfocus::backward<decltype(phi)>(*params, grads); });
  } catch (...) {  // only std::bad_alloc is thrown; it must not reach C
  }
  return done ? 0 : 1;
}
