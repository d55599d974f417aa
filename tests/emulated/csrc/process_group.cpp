// Semantics of ProcessGroupNCCL. Operations of one communicator run in the order of their submission, on a stream of their own or, if
// they are synchronous collectives, on the current stream. wait() makes the current stream wait, not the host. A watchdog ends the
// process if an operation isn't done in time.
#include "process_group.h"
#include "channels.h"
#include "forms.h"
#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <csignal>
#include <iostream>
#include <list>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace py = pybind11;

namespace emulated {

namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Milliseconds = std::chrono::milliseconds;

struct EmulatedWork final : Work {
  Mark end;
  int device;
  Tensors stashed;  // kept until the caller's stream has waited, or the operation is done
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // for DDP
  std::string description;
  Clock::time_point deadline;
  std::mutex mutex;

  EmulatedWork(int rank, OpType operation) : Work(rank, operation) {}
  bool isCompleted() override { return end.done(); }
  bool isSuccess() const override { return end.done(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void synchronize() override { wait(); }
  bool wait(Milliseconds = kNoTimeout) override {
    wait_for(current_stream(device), end);
    unstash();
    if (opType_ == OpType::BARRIER) {
      on_sync("synchronize", "barrier");
      end.stream->wait(end.number);
      check_failure();
    }
    return true;
  }
  void unstash() {
    Tensors released;
    std::lock_guard<std::mutex> lock(mutex);
    released.swap(stashed);
  }
};

// Ends the process if an operation takes too long, as ProcessGroupNCCL's watchdog does.
class Watchdog {
 public:
  static Watchdog& get() {
    static auto* it = new Watchdog;
    return *it;
  }
  void add(const c10::intrusive_ptr<EmulatedWork>& work) {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(work);
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return works_.empty();
  }

 private:
  Watchdog() {
    std::thread([this] { loop(); }).detach();
  }
  void loop() {
    for (; !stopped(); std::this_thread::sleep_for(Milliseconds(5))) {
      std::list<c10::intrusive_ptr<EmulatedWork>> done;
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto it = works_.begin(); it != works_.end();) {
        auto next = std::next(it);
        if ((*it)->end.done()) done.splice(done.end(), works_, it);
        else if (Clock::now() > (*it)->deadline) give_up(**it);
        it = next;
      }
      for (auto& work : done) work->unstash();
    }
  }
  void give_up(const EmulatedWork& work) {
    std::ostringstream text;
    text << "[emulated NCCL] Watchdog caught collective operation timeout: " << work.description << "\nPending operations:\n";
    for (auto& other : works_) text << "  " << other->description << "\n";
    text << "Streams:\n" << dump();
    std::cerr << text.str() << std::flush;
    std::signal(SIGABRT, SIG_DFL);
    std::abort();
  }

  std::mutex mutex_;
  std::list<c10::intrusive_ptr<EmulatedWork>> works_;
};

// DDP asks for the times of its phases, and gets none.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

void reduce_into(Tensor target, const std::vector<Tensor>& parts, ReduceOp::RedOpType operation) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto sum = parts[0].clone();
  for (size_t i = 1; i < parts.size(); i++) {
    if (operation == ReduceOp::SUM || operation == ReduceOp::AVG) sum.add_(parts[i]);
    else if (operation == ReduceOp::PRODUCT) sum.mul_(parts[i]);
    else if (operation == ReduceOp::MAX) sum = at::maximum(sum, parts[i]);
    else if (operation == ReduceOp::MIN) sum = at::minimum(sum, parts[i]);
    else TORCH_CHECK(false, "emulated NCCL: this reduction is not implemented");
  }
  if (operation == ReduceOp::AVG) sum.div_(int64_t(parts.size()));
  target.copy_(sum);
}

struct EmulatedNCCL final : c10d::Backend {
  struct Opts final : Backend::Options {
    explicit Opts(Milliseconds timeout) : Options("nccl", timeout) {}
  };

  EmulatedNCCL(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), options(c10::make_intrusive<Opts>(timeout)), channels(std::make_shared<Channels>(rank, size)) {
    auto bytes = channels->address();
    store->set("emulated/" + std::to_string(rank), std::vector<uint8_t>(bytes.begin(), bytes.end()));
    std::vector<std::string> addresses;
    for (int peer = 0; peer < size; peer++) {
      auto found = store->get("emulated/" + std::to_string(peer));
      addresses.emplace_back(found.begin(), found.end());
    }
    channels->set_addresses(std::move(addresses));
  }

  // Submission

  static void check(const Tensor& t) {
    TORCH_CHECK(t.is_cuda() && !t.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  }

  c10::intrusive_ptr<Work> enqueue(OpType operation, bool async, const Tensors& tensors, const Tensors& outputs,
                                   const std::string& details, Job job) {
    int device = tensors.empty() ? current_device() : tensors[0].device().index();
    for (auto& t : tensors) check(t);
    if (!stream) stream = &own_stream(device, "NCCL group " + getGroupUid() + " " + getGroupDesc());
    TORCH_CHECK(stream->device == device, "NCCL: the communicator is on cuda:", stream->device, ", the operation on cuda:", device);
    auto& current = current_stream(device);
    auto& on = async ? *stream : current;
    count_launch(device, "nccl " + c10d::opTypeToString(operation));
    if (async) wait_for(on, record(current));
    wait_for(on, last);  // NCCL runs one operation of a communicator at a time
    static Mark slots[16];
    if (settings().one_slot) wait_for(on, slots[device]);
    auto work = c10::make_intrusive<EmulatedWork>(getRank(), operation);
    on.submit("NCCL operation", std::move(job));
    work->end = last = slots[device] = record(on);
    work->device = device;
    if (async) work->stashed = tensors;
    work->outputs = outputs;
    if (!outputs.empty()) {  // complete at once; streams of those who wait for the future wait for the operation
      auto before = exchange_stream(device, on.id);
      work->future = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(c10::kCUDA, device)});
      work->future->markCompleted(c10::IValue(outputs));
      exchange_stream(device, before);
    }
    std::ostringstream text;
    text << "Work(rank=" << getRank() << " of " << getSize() << ", group=" << getGroupDesc() << ", number=" << ++submitted
         << ", OpType=" << c10d::opTypeToString(operation) << details << ", Timeout(ms)=" << options->timeout.count() << ")";
    work->description = text.str();
    work->deadline = Clock::now() + options->timeout;
    Watchdog::get().add(work);
    return work;
  }

  Header header(OpType operation, const Tensor& t, uint64_t sequence = 0, int reduction = 0) {
    return Header{uint32_t(operation), uint32_t(t.scalar_type()), uint32_t(reduction), uint64_t(t.nbytes()), sequence};
  }

  static void* memory(const Tensor& t) { return host_view(t).mutable_data_ptr(); }

  // Point to point

  c10::intrusive_ptr<Work> point_to_point(bool sends, Tensors& tensors, int peer) {
    auto& t = tensors.at(0);
    check(t);
    Transfer transfer{sends, peer, memory(t), header(OpType::SEND, t)};
    std::ostringstream text;
    text << ", " << (sends ? "to" : "from") << " rank " << peer << ": " << t.numel() << " x " << t.scalar_type();
    if (grouping) {
      group.push_back(transfer);
      group_tensors.push_back(t);
      group_details += text.str();
      return nullptr;
    }
    auto connected = channels;
    return enqueue(sends ? OpType::SEND : OpType::RECV, true, {t}, sends ? Tensors{} : Tensors{t}, text.str(),
                   [connected, transfer] { connected->run({transfer}); });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int) override { return point_to_point(true, tensors, peer); }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int) override { return point_to_point(false, tensors, peer); }

  void startCoalescing() override {
    grouping = true;
    group.clear();
    group_tensors.clear();
    group_details.clear();
  }
  c10::intrusive_ptr<Work> endCoalescing() override {
    grouping = false;
    if (group.empty()) return nullptr;
    auto connected = channels;
    auto transfers = group;
    return enqueue(OpType::COALESCED, true, group_tensors, {}, group_details, [connected, transfers] { connected->run(transfers); });
  }
  bool supportsCoalescing() const override { return true; }

  // Collectives

  c10::intrusive_ptr<Work> collective(OpType operation, bool async, const Tensors& tensors, const Tensors& outputs, Job job) {
    TORCH_CHECK(!grouping, "emulated NCCL: collectives in a group are not implemented");
    std::ostringstream text;
    if (!tensors.empty()) text << ", " << tensors[0].numel() << " x " << tensors[0].scalar_type();
    return enqueue(operation, async, tensors, outputs, text.str(), std::move(job));
  }

  // Every rank's tensor, in the order of ranks. Runs in a job.
  static Tensors exchange(Channels& channels, const Header& header, int rank, int size, const Tensor& own) {
    Tensors parts;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < size; peer++) {
      parts.push_back(peer == rank ? own : at::empty_like(own));
      if (peer == rank) continue;
      transfers.push_back({true, peer, own.mutable_data_ptr(), header});
      transfers.push_back({false, peer, parts.back().mutable_data_ptr(), header});
    }
    channels.run(transfers);
    return parts;
  }

  c10::intrusive_ptr<Work> gather_parts(OpType operation, bool async, const Tensor& input, const Tensors& outputs, int reduction,
                                        std::function<void(const Tensors&)> take) {
    auto connected = channels;
    auto form = header(operation, input, ++sequence, reduction);
    auto own = host_view(input);
    int rank = getRank(), size = getSize();
    auto tensors = outputs;
    tensors.push_back(input);
    return collective(operation, async, tensors, outputs, [=] {
      at::AutoDispatchBelowADInplaceOrView guard;
      take(exchange(*connected, form, rank, size, own));
    });
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto target = host_view(tensors.at(0));
    auto operation = opts.reduceOp.op_;
    return gather_parts(OpType::ALLREDUCE, opts.asyncOp, tensors[0], {tensors[0]}, int(operation),
                        [=](const Tensors& parts) { reduce_into(target, parts, operation); });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Tensors targets;
    for (auto& t : outputs.at(0)) targets.push_back(host_view(t));
    return gather_parts(OpType::ALLGATHER, opts.asyncOp, inputs.at(0), outputs[0], 0, [=](const Tensors& parts) {
      for (size_t i = 0; i < parts.size(); i++) Tensor(targets[i]).copy_(parts[i]);
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto target = host_view(output);
    return gather_parts(OpType::_ALLGATHER_BASE, opts.asyncOp, input, {output}, 0, [=](const Tensors& parts) {
      Tensor(target).copy_(at::cat(parts).view(target.sizes()));
    });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto target = host_view(output);
    auto operation = opts.reduceOp.op_;
    int rank = getRank(), size = getSize();
    return gather_parts(OpType::_REDUCE_SCATTER_BASE, opts.asyncOp, input, {output}, int(operation), [=](const Tensors& parts) {
      Tensors own;
      for (auto& part : parts) own.push_back(part.flatten().chunk(size)[rank].view(target.sizes()));
      reduce_into(target, own, operation);
    });
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto connected = channels;
    auto form = header(OpType::BROADCAST, tensors.at(0), ++sequence);
    auto* data = memory(tensors[0]);
    std::vector<Transfer> transfers;
    if (getRank() != opts.rootRank) transfers.push_back({false, int(opts.rootRank), data, form});
    else
      for (int peer = 0; peer < getSize(); peer++)
        if (peer != getRank()) transfers.push_back({true, peer, data, form});
    return collective(OpType::BROADCAST, opts.asyncOp, {tensors[0]}, {tensors[0]}, [=] { connected->run(transfers); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    TORCH_CHECK(opts.device_ids.empty() || opts.device_ids[0] == current_device(),
                "NCCL: barrier on a device that is not the current one");
    auto own = at::zeros({1});
    auto form = header(OpType::BARRIER, own, ++sequence);
    auto connected = channels;
    int rank = getRank(), size = getSize();
    return collective(OpType::BARRIER, opts.asyncOp, {}, {}, [=] {
      at::AutoDispatchBelowADInplaceOrView guard;
      exchange(*connected, form, rank, size, own);
    });
  }

  // The group itself

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    auto found = std::find(ranks.begin(), ranks.end(), getRank());
    if (found == ranks.end()) return nullptr;
    return c10::make_intrusive<EmulatedNCCL>(store, int(found - ranks.begin()), int(ranks.size()), opts->timeout);
  }
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(Milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return submitted; }
  void eagerConnectSingleDevice(at::Device) override {}
  void abort() override {}
  void shutdown() override {
    if (last.stream) last.stream->wait(last.number);
  }

  c10::intrusive_ptr<Opts> options;
  std::shared_ptr<Channels> channels;
  Stream* stream = nullptr;
  Mark last;
  uint64_t submitted = 0, sequence = 0;
  bool grouping = false;
  std::vector<Transfer> group;
  Tensors group_tensors;
  std::string group_details;
};

}  // namespace

void bind_process_group(py::module& m) {
  using Opts = EmulatedNCCL::Opts;
  auto copy = [](const Opts& o) { return c10::make_intrusive<Opts>(o.timeout); };
  py::class_<EmulatedNCCL, c10::intrusive_ptr<EmulatedNCCL>, c10d::Backend> group(m, "ProcessGroupNCCL");
  py::class_<Opts, c10::intrusive_ptr<Opts>, c10d::Backend::Options>(group, "Options", py::dynamic_attr())
      .def(py::init([](bool) { return c10::make_intrusive<Opts>(Milliseconds(600000)); }), py::arg("is_high_priority_stream") = false)
      .def("__copy__", copy)
      .def("__deepcopy__", [copy](const Opts& o, py::object) { return copy(o); });
  group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const c10::intrusive_ptr<Opts>& options) {
             return c10::make_intrusive<EmulatedNCCL>(store, rank, size, options->timeout);
           }),
           py::call_guard<py::gil_scoped_release>())
      .def("perform_nocolor_split", [](EmulatedNCCL&, py::object) {})
      .def("_set_default_timeout", [](EmulatedNCCL& g, Milliseconds timeout) { g.setTimeout(timeout); })
      .def_property_readonly("options", [](EmulatedNCCL& g) { return g.options; });
}

}  // namespace emulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, emulated::NoTimer);
}
