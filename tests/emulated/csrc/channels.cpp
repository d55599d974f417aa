#include "channels.h"
#include "streams.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace emulated {

namespace {

constexpr size_t CHUNK = 1 << 16;

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

void require(bool success, const char* what) {
  if (!success) throw std::runtime_error(std::string("emulated NCCL: ") + what + ": " + std::strerror(errno));
}

enum class Phase { CONNECT, HEADER, ANSWER, DATA, DONE, LOST };

struct Answer {
  uint8_t accepted;
  Header header;
};

}  // namespace

bool Header::operator==(const Header& other) const {
  return operation == other.operation && type == other.type && reduction == other.reduction && bytes == other.bytes &&
         sequence == other.sequence;
}

std::string Header::text() const {
  auto name = c10d::opTypeToString(c10d::OpType(operation));
  auto number = sequence ? " number " + std::to_string(sequence) : "";
  return name + number + " of " + std::to_string(bytes) + " bytes " + c10::toString(c10::ScalarType(type));
}

// One transfer under way
struct Step {
  Channels& channels;
  const Transfer& transfer;
  int rank;
  Phase phase = Phase::CONNECT;
  int fd = -1;
  size_t progress = 0;
  Header header{};
  Answer answer{};

  void next(Phase following) {
    phase = following;
    progress = 0;
  }

  bool writes() const {
    return transfer.sends ? phase == Phase::HEADER || phase == Phase::DATA : phase == Phase::ANSWER;
  }

  // Move up to one chunk; return whether all `size` bytes have been moved.
  bool move(void* data, size_t size, bool writing) {
    if (progress < size) {
      auto* at = static_cast<char*>(data) + progress;
      auto count = std::min(size - progress, CHUNK);
      auto moved = writing ? ::send(fd, at, count, MSG_DONTWAIT | MSG_NOSIGNAL) : ::recv(fd, at, count, MSG_DONTWAIT);
      if (moved > 0) progress += moved;
      else if (moved == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) phase = Phase::LOST;
    }
    return phase != Phase::LOST && progress == size;
  }

  void connect() {
    fd = transfer.sends ? channels.outgoing(transfer.peer) : channels.incoming(transfer.peer);
    if (fd >= 0) next(Phase::HEADER);
  }

  [[noreturn]] void refuse(const Header& theirs) {
    throw std::runtime_error("emulated NCCL: rank " + std::to_string(rank) + (transfer.sends ? " sends " : " expects ") +
                             transfer.header.text() + ", but rank " + std::to_string(transfer.peer) +
                             (transfer.sends ? " expects " : " sends ") + theirs.text());
  }

  void advance() {
    const bool sends = transfer.sends;
    if (phase == Phase::CONNECT) connect();
    if (phase == Phase::HEADER) {
      header = sends ? transfer.header : header;
      if (!move(&header, sizeof header, sends)) return;
      answer = {uint8_t(header == transfer.header), transfer.header};
      next(Phase::ANSWER);
      if (sends) answer = {};
    }
    if (phase == Phase::ANSWER) {
      if (!move(&answer, sizeof answer, !sends)) return;
      if (!answer.accepted) refuse(sends ? answer.header : header);
      next(Phase::DATA);
    }
    if (phase == Phase::DATA && move(transfer.data, transfer.header.bytes, sends)) next(Phase::DONE);
  }
};

Channels::Channels(int rank, int size) : rank_(rank) {
  static std::atomic<int> count{0};
  address_ = "emulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(count++);
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  require(listener_ >= 0, "socket");
  socklen_t length;
  auto address = abstract_address(address_, &length);
  require(::bind(listener_, reinterpret_cast<sockaddr*>(&address), length) == 0, "bind");
  require(::listen(listener_, 2 * size + 8) == 0, "listen");
}

Channels::~Channels() {
  for (auto* sockets : {&outgoing_, &incoming_})
    for (auto& [peer, fd] : *sockets) ::close(fd);
  ::close(listener_);
}

int Channels::outgoing(int peer) {
  auto found = outgoing_.find(peer);
  if (found != outgoing_.end()) return found->second;
  int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  require(fd >= 0, "socket");
  socklen_t length;
  auto address = abstract_address(addresses_.at(peer), &length);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    ::close(fd);
    return -1;  // the peer is lost
  }
  int32_t rank = rank_;
  require(::send(fd, &rank, sizeof rank, MSG_NOSIGNAL) == sizeof rank, "hello");
  return outgoing_[peer] = fd;
}

int Channels::incoming(int peer) {
  if (!incoming_.count(peer)) accept_all();
  auto found = incoming_.find(peer);
  return found == incoming_.end() ? -1 : found->second;
}

void Channels::accept_all() {
  for (int fd; (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
    int32_t peer;
    if (::recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer) incoming_[peer] = fd;
    else ::close(fd);
  }
}

void Channels::run(const std::vector<Transfer>& transfers) {
  std::map<std::pair<bool, int>, std::vector<Step>> queues;  // by direction and peer; only the first of each queue is active
  for (auto it = transfers.rbegin(); it != transfers.rend(); ++it) queues[{it->sends, it->peer}].push_back(Step{*this, *it, rank_});
  while (!queues.empty()) {
    std::vector<pollfd> polled{{listener_, POLLIN, 0}};
    for (auto found = queues.begin(); found != queues.end();) {
      auto& queue = found->second;
      while (!queue.empty()) {
        auto& step = queue.back();
        auto before = std::make_pair(step.phase, step.progress);
        step.advance();
        if (step.phase != Phase::DONE && before == std::make_pair(step.phase, step.progress)) {
          if (step.fd >= 0 && step.phase != Phase::LOST) polled.push_back({step.fd, short(step.writes() ? POLLOUT : POLLIN), 0});
          break;
        }
        if (step.phase == Phase::DONE) queue.pop_back();
      }
      if (queue.empty()) found = queues.erase(found);
      else ++found;
    }
    if (!queues.empty()) ::poll(polled.data(), polled.size(), 20);
    if (stopped()) return;
  }
}

}  // namespace emulated
