// A call that outlives the operator: what its backward sees.
#ifndef COSFORMER_OPS_SAVED_CALL_H_
#define COSFORMER_OPS_SAVED_CALL_H_

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/autograd_util.h"
#include "ops/call.h"

namespace cosformer::ops {

// Tensors and options of a call (LinearCall, ...), owned: a call's references
// would dangle. Types are its members' in order, and Call::members() ties them.
template <typename Call, typename Types>
class SavedCall;
template <typename Call, typename... Types>
class SavedCall<Call, TypeList<Types...>> {
 public:
  // Appends the call's tensors to saved, which then goes into the context, as
  // do the options.
  static void save(torch::autograd::AutogradContext* ctx, const Call& call,
                   torch::autograd::variable_list saved) {
    std::vector<c10::IValue> options;
    const auto keep = [&](const auto& member) {
      using Member = std::remove_cvref_t<decltype(member)>;
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        saved.push_back(member);
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        saved.push_back(member.value_or(at::Tensor()));
      } else if constexpr (std::is_same_v<Member, std::string_view>) {
        options.emplace_back(std::string(member));
      } else {
        options.emplace_back(member);
      }
    };
    std::apply([&](const auto&... member) { (keep(member), ...); },
               call.members());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(std::move(options));
  }

  // saved: what get_saved_variables gave, the call's tensors from `first` on.
  SavedCall(torch::autograd::AutogradContext* ctx,
            const torch::autograd::variable_list& saved, size_t first) {
    const auto tuple = ctx->saved_data["options"].toTuple();
    auto tensor = saved.begin() + static_cast<std::ptrdiff_t>(first);
    auto option = tuple->elements().asArrayRef().begin();
    const auto take = [&](auto& member) {
      using Member = std::remove_cvref_t<decltype(member)>;
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        member = *tensor++;
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        member = if_defined(*tensor++);
      } else {
        member = (option++)->template to<Member>();
      }
    };
    std::apply([&](auto&... member) { (take(member), ...); }, members_);
  }

  // No longer than this object lives.
  Call call() const {
    return std::apply([](const auto&... member) { return Call{member...}; },
                      members_);
  }

 private:
  template <typename T>
  using Owned = std::conditional_t<std::is_same_v<T, std::string_view>,
                                   std::string, std::remove_cvref_t<T>>;
  std::tuple<Owned<Types>...> members_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SAVED_CALL_H_
