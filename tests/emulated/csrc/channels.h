// Connections of the ranks of one communicator: a Unix socket for each pair of ranks and direction.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emulated {

// What both sides of a transfer must agree on
struct Header {
  uint32_t operation;  // c10d::OpType; SEND for point to point
  uint32_t type;       // c10::ScalarType
  uint32_t reduction;
  uint64_t bytes;
  uint64_t sequence;   // number of the collective in this communicator

  bool operator==(const Header& other) const;
  std::string text() const;
};

struct Transfer {
  bool sends;
  int peer;
  void* data;  // read and written when the transfer runs
  Header header;
};

class Channels {
 public:
  Channels(int rank, int size);
  ~Channels();
  std::string address() const { return address_; }
  void set_addresses(std::vector<std::string> addresses) { addresses_ = std::move(addresses); }

  // Run transfers together, until all of them are done. A sender waits until its receiver has posted the receive (rendezvous).
  // Transfers of one direction with one peer match in their order. A peer that is lost is waited for in vain, as with NCCL.
  // Throws if the two sides don't match.
  void run(const std::vector<Transfer>& transfers);

 private:
  friend struct Step;
  int outgoing(int peer);
  int incoming(int peer);  // -1: the peer hasn't connected yet
  void accept_all();

  int rank_;
  int listener_;
  std::string address_;
  std::vector<std::string> addresses_;
  std::map<int, int> outgoing_, incoming_;
};

}  // namespace emulated
