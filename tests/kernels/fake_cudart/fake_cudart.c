// A CUDA runtime without a GPU: a worker thread a stream, memcpy for copies, a log, and faults on request.
//
// Tests steer it with the fake_* functions. While copies are held, a stream stops before each copy until the test lets
// one through; so tests decide what is in flight and need no clock.
#include "streams.h"

// -- the runtime's functions --

int cudaSetDevice(int device) {
  const int error = checked("cudaSetDevice");
  if (error) return error;
  if (device > 1) return 101;
  current_device = device;
  return 0;
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return checked("cudaDeviceGetStreamPriorityRange");
}

int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  const int error = checked("cudaStreamCreateWithPriority");
  if (error || current_device < 0 || flags != 1) return error ? error : 1;
  pthread_mutex_lock(&lock);
  Stream* s = calloc(1, sizeof *s);
  s->id = num_streams++ % MAX_STREAMS;
  s->priority = priority;
  streams[s->id] = s;
  ++num_live_streams;
  note("stream %d priority %d device %d\n", s->id, priority, current_device);
  pthread_mutex_unlock(&lock);
  pthread_create(&s->thread, NULL, work, s);
  *stream = s;
  return 0;
}

int cudaStreamDestroy(void* stream) {
  Stream* s = stream;
  pthread_mutex_lock(&lock);
  s->stop = 1;
  streams[s->id] = NULL;
  --num_live_streams;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  pthread_join(s->thread, NULL);
  free(s);
  return 0;
}

int cudaStreamSynchronize(void* stream) {
  Stream* s = stream;
  pthread_mutex_lock(&lock);
  while (s->head) pthread_cond_wait(&changed, &lock);
  const int error = s->error;
  s->error = 0;
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaMemcpyAsync(void* dst, const void* src, size_t num_bytes, int kind, void* stream) {
  Stream* s = stream;
  pthread_mutex_lock(&lock);
  int error = kind == 4 && current_device >= 0 ? injected("cudaMemcpyAsync") : 1;
  if (!error) {
    Op op = {.kind = COPY, .dst = dst, .src = src, .num_bytes = num_bytes};
    if (async_countdown > 0 && --async_countdown == 0) op.error = async_code;
    note("launch %d %zu\n", s->id, num_bytes);
    if (++s->num_queued_copies > max_queued[s->id]) max_queued[s->id] = s->num_queued_copies;
    push(s, op);
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaEventCreateWithFlags(void** event, unsigned flags) {
  (void)flags;
  const int error = checked("cudaEventCreateWithFlags");
  if (error) return error;
  *event = calloc(1, sizeof(Event));
  pthread_mutex_lock(&lock);
  ++num_live_events;
  pthread_mutex_unlock(&lock);
  return 0;
}

int cudaEventDestroy(void* event) {
  pthread_mutex_lock(&lock);
  --num_live_events;
  pthread_mutex_unlock(&lock);
  free(event);
  return 0;
}

int cudaEventRecord(void* event, void* stream) {
  Event* e = event;
  pthread_mutex_lock(&lock);
  const int error = injected("cudaEventRecord");
  if (!error) push(stream, (Op){.kind = RECORD, .event = e, .sequence = ++e->recorded});
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  Event* e = event;
  pthread_mutex_lock(&lock);
  const int error = flags ? 1 : injected("cudaStreamWaitEvent");
  if (!error) {
    note("wait %d\n", ((Stream*)stream)->id);
    push(stream, (Op){.kind = WAIT, .event = e, .sequence = e->recorded});
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaEventQuery(void* event) {
  Event* e = event;
  pthread_mutex_lock(&lock);
  const int error = e->reached < e->recorded ? 600 : e->error;
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaEventSynchronize(void* event) {
  Event* e = event;
  pthread_mutex_lock(&lock);
  while (e->reached < e->recorded) pthread_cond_wait(&changed, &lock);
  const int error = e->error;
  pthread_mutex_unlock(&lock);
  return error;
}

int cudaHostAlloc(void** memory, size_t num_bytes, unsigned flags) {
  (void)flags;
  const int error = checked("cudaHostAlloc");
  if (error) return error;
  *memory = malloc(num_bytes);
  pthread_mutex_lock(&lock);
  ++num_live_pinned;
  pthread_mutex_unlock(&lock);
  return 0;
}

int cudaFreeHost(void* memory) {
  pthread_mutex_lock(&lock);
  --num_live_pinned;
  pthread_mutex_unlock(&lock);
  free(memory);
  return 0;
}

const char* cudaGetErrorString(int error) {
  if (error == 1) return "invalid argument";
  if (error == 101) return "invalid device ordinal";
  if (error == 2) return "out of memory";
  return error == 719 ? "unspecified launch failure" : "some other error";
}

// -- what tests call --

void fake_reset(void) {
  pthread_mutex_lock(&lock);
  num_streams = held = fail_countdown = async_countdown = copy_delay_us = 0;
  memset(permits, 0, sizeof permits);
  memset(max_queued, 0, sizeof max_queued);
  memset(num_copies, 0, sizeof num_copies);
  fail_name[0] = log_text[0] = 0;
  log_length = 0;
  pthread_mutex_unlock(&lock);
}

void fake_hold(int on) {
  pthread_mutex_lock(&lock);
  held = on;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static struct timespec patience(void) {
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += 120;
  return deadline;
}

// Lets `count` held copies of a stream run and returns 1 when they have, 0 when they never came.
int fake_permit(int stream, int count) {
  const struct timespec deadline = patience();
  pthread_mutex_lock(&lock);
  const int target = num_copies[stream] + count;
  permits[stream] += count;
  pthread_cond_broadcast(&changed);
  int late = 0;
  while (!late && num_copies[stream] < target) late = pthread_cond_timedwait(&changed, &lock, &deadline);
  pthread_mutex_unlock(&lock);
  return !late;
}

// Returns 1 when `count` copies stand in a stream, the running one included, 0 when they never came.
int fake_wait_queued(int stream, int count) {
  const struct timespec deadline = patience();
  pthread_mutex_lock(&lock);
  int late = 0;
  while (!late && (!streams[stream] || streams[stream]->num_queued_copies < count))
    late = pthread_cond_timedwait(&changed, &lock, &deadline);
  pthread_mutex_unlock(&lock);
  return !late;
}

// An event that is recorded, and reached when the test says so.
void* fake_event(void) {
  void* event = NULL;
  cudaEventCreateWithFlags(&event, 0);
  pthread_mutex_lock(&lock);
  ++((Event*)event)->recorded;
  pthread_mutex_unlock(&lock);
  return event;
}

void fake_reach(void* event) {
  Event* e = event;
  pthread_mutex_lock(&lock);
  e->reached = e->recorded;
  note("event\n");
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

long fake_num_recorded(void* event) {
  pthread_mutex_lock(&lock);
  const long recorded = ((Event*)event)->recorded;
  pthread_mutex_unlock(&lock);
  return recorded;
}

// The `nth` call of `name` from now on (1: the next) returns `code`.
void fake_fail(const char* name, int nth, int code) {
  pthread_mutex_lock(&lock);
  snprintf(fail_name, sizeof fail_name, "%s", name);
  fail_countdown = nth;
  fail_code = code;
  pthread_mutex_unlock(&lock);
}

// The `nth` copy from now on is launched well and fails when it runs.
void fake_fail_copy(int nth, int code) {
  pthread_mutex_lock(&lock);
  async_countdown = nth;
  async_code = code;
  pthread_mutex_unlock(&lock);
}

void fake_delay_copies(int microseconds) { copy_delay_us = microseconds; }

int fake_max_queued(int stream) {
  pthread_mutex_lock(&lock);
  const int most = max_queued[stream];
  pthread_mutex_unlock(&lock);
  return most;
}

// Streams, events and pinned blocks that exist.
int fake_num_live(void) {
  pthread_mutex_lock(&lock);
  const int live = num_live_streams + num_live_events + num_live_pinned;
  pthread_mutex_unlock(&lock);
  return live;
}

const char* fake_log(void) { return log_text; }
