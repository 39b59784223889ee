// State of the fake runtime: streams with a worker thread each, events, the log and the faults to come.
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { COPY, RECORD, WAIT };
enum { MAX_STREAMS = 16, LOG_BYTES = 1 << 20 };

typedef struct Event {
  long recorded, reached;  // sequence numbers of recordings
  int error;
} Event;

typedef struct Op {
  int kind, error;
  void* dst;
  const void* src;
  size_t num_bytes;
  Event* event;
  long sequence;
  struct Op* next;
} Op;

typedef struct Stream {
  int id, priority, stop, num_queued_copies, error;
  Op *head, *tail;
  pthread_t thread;
} Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream* streams[MAX_STREAMS];
static int num_streams, num_live_streams, num_live_events, num_live_pinned;
static int held, permits[MAX_STREAMS], max_queued[MAX_STREAMS], num_copies[MAX_STREAMS];
static int copy_delay_us;
static char fail_name[64];
static int fail_countdown, fail_code, async_countdown, async_code;
static char log_text[LOG_BYTES];
static size_t log_length;
static __thread int current_device = -1;

static void note(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (log_length < LOG_BYTES - 200) log_length += (size_t)vsnprintf(log_text + log_length, 200, format, arguments);
  va_end(arguments);
}

// Non-zero when this call of `name` is the one that the test wants to fail.
static int injected(const char* name) {
  if (strcmp(name, fail_name) != 0 || fail_countdown == 0 || --fail_countdown > 0) return 0;
  note("%s fails\n", name);
  return fail_code;
}

static int checked(const char* name) {
  pthread_mutex_lock(&lock);
  const int error = injected(name);
  pthread_mutex_unlock(&lock);
  return error;
}

static int ready(Stream* s) {
  if (!s->head) return 0;
  if (s->head->kind == COPY) return !held || permits[s->id] > 0;
  if (s->head->kind == WAIT) return s->head->event->reached >= s->head->sequence;
  return 1;
}

static void run(Stream* s, Op* op) {
  if (op->kind == COPY) {
    if (held) --permits[s->id];
    note("start %d %zu\n", s->id, op->num_bytes);
    pthread_mutex_unlock(&lock);
    if (copy_delay_us) usleep((useconds_t)copy_delay_us);
    if (!op->error) memcpy(op->dst, op->src, op->num_bytes);
    pthread_mutex_lock(&lock);
    note("end %d %zu\n", s->id, op->num_bytes);
    --s->num_queued_copies;
    ++num_copies[s->id];
    if (op->error) s->error = op->error;
  } else if (op->kind == RECORD) {
    op->event->error = s->error;  // reported by the next event, then forgotten: a fault of one copy
    s->error = 0;
    if (op->event->reached < op->sequence) op->event->reached = op->sequence;
    note("reached %d\n", s->id);
  }
}

static void* work(void* argument) {
  Stream* s = argument;
  pthread_mutex_lock(&lock);
  while (1) {
    while (!s->stop && !ready(s)) pthread_cond_wait(&changed, &lock);
    if (s->stop && !s->head) break;
    if (s->stop && !ready(s)) break;
    Op* op = s->head;
    run(s, op);
    s->head = op->next;
    if (!s->head) s->tail = NULL;
    free(op);
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void push(Stream* s, Op op) {
  Op* copy = malloc(sizeof op);
  *copy = op;
  if (s->tail)
    s->tail->next = copy;
  else
    s->head = copy;
  s->tail = copy;
  pthread_cond_broadcast(&changed);
}
