import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.util.Locale;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import java.util.concurrent.locks.LockSupport;
import java.util.function.Consumer;
import org.HdrHistogram.Histogram;
import org.HdrHistogram.Recorder;

/**
 * The load that all peers get, from one thread: a closed loop under a semaphore, or appends at a fixed rate.
 *
 * <p>Arguments: servers, entry bytes, adds in flight (over all ledgers), ledgers, seconds of warm-up, seconds
 * measured, entries to write and read back, kind ({@code benchmarks/peers/workloads.py}), appends a second. An
 * add's latency runs from the moment the semaphore let it pass to its completion. Prints {@code warm} when the
 * measured part begins, and the figures as one line of JSON. Of its caller it asks {@code kill N} (a server) or
 * {@code evict} (the pages of all files), and goes on when a line of standard input says that it is done.
 */
public final class Drive {
  /** What is measured. */
  public interface Target extends AutoCloseable {
    /** Adds an entry to one of the ledgers. */
    CompletableFuture<?> add(int ledger, byte[] payload) throws Exception;

    /** Closes the first ledger, and gets ready to read what was added to it. */
    default void beginReading() throws Exception {
      throw new UnsupportedOperationException("this peer is measured writing only");
    }

    /** Reads all that was added to the first ledger, in order, and gives the number of bytes seen. */
    default long readAll(long entries) throws Exception {
      throw new UnsupportedOperationException("this peer is measured writing only");
    }

    /** Hands every payload that is added to the first ledger from now on to a function, from another thread. */
    default void follow(Consumer<byte[]> seen) throws Exception {
      throw new UnsupportedOperationException("nothing is followed here");
    }

    /** Gives the number, from 1 on, of the server that the first ledger needs most. */
    default int leader() throws Exception {
      return 1;
    }

    /** Gets a second client ready, which knows nothing of the first one. */
    default void prepareTakeover() throws Exception {
      throw new UnsupportedOperationException("writers are not taken over here");
    }

    /** Has the second client go on behind all that the first one wrote; ends when it has appended an entry. */
    default void takeOver() throws Exception {
      throw new UnsupportedOperationException("writers are not taken over here");
    }
  }

  private static final double STRAGGLERS_S = 1;
  private static final long WARM_PART = 10;
  private static final double SEEN_MIN = 0.99;
  private static final BufferedReader ANSWERS = new BufferedReader(new InputStreamReader(System.in));

  /** Makes the target once the arguments are known. */
  public interface Maker {
    Target make(String servers, int ledgers, int inFlight) throws Exception;
  }

  private Drive() {}

  public static void run(String[] arguments, Maker maker) throws Exception {
    String servers = arguments[0];
    int entryBytes = Integer.parseInt(arguments[1]);
    int inFlight = Integer.parseInt(arguments[2]);
    int ledgers = Integer.parseInt(arguments[3]);
    double warmUp = Double.parseDouble(arguments[4]);
    double seconds = Double.parseDouble(arguments[5]);
    long readEntries = Long.parseLong(arguments[6]);
    String kind = arguments[7];
    int rate = Integer.parseInt(arguments[8]);
    try {
      Target target = maker.make(servers, ledgers, inFlight);
      if (kind.equals("takeover")) {
        target.prepareTakeover();
      }
      System.out.println("ready");
      String figures =
          switch (kind) {
            case "read", "cold" ->
                read(target, entryBytes, inFlight, readEntries, warmUp, seconds, kind.equals("cold"));
            case "follow" -> follow(target, entryBytes, rate, warmUp, seconds);
            case "takeover" -> takeover(target, entryBytes, inFlight, warmUp);
            case "failover" -> write(target, entryBytes, inFlight, ledgers, warmUp, seconds, true);
            default -> write(target, entryBytes, inFlight, ledgers, warmUp, seconds, false);
          };
      System.out.println(figures);
      System.out.flush();
    } catch (Exception error) {
      // Else the threads of the client would keep the process, and whoever waits for it.
      error.printStackTrace();
      Runtime.getRuntime().halt(1);
    }
    // What is still in flight is not waited for, and neither are the threads of the client.
    Runtime.getRuntime().halt(0);
  }

  private static String write(
      Target target,
      int entryBytes,
      int inFlight,
      int ledgers,
      double warmUp,
      double seconds,
      boolean kills)
      throws Exception {
    byte[] payload = new byte[entryBytes];
    java.util.Arrays.fill(payload, (byte) 'x');
    AtomicLong lastAt = new AtomicLong(System.nanoTime());
    AtomicLong pause = new AtomicLong();
    Semaphore room = new Semaphore(inFlight);
    Recorder recorder = new Recorder(3);
    LongAdder failed = new LongAdder();
    LongAdder all = new LongAdder();
    long began = System.nanoTime();
    long warm = began + (long) (warmUp * 1e9);
    long end = warm + (long) (seconds * 1e9);
    boolean isWarm = false;
    long cpuBefore = 0;
    int ledger = 0;
    while (true) {
      room.acquire();
      long sent = System.nanoTime();
      if (!isWarm && sent >= warm) {
        isWarm = true;
        recorder.reset();
        failed.reset();
        cpuBefore = cpu();
        System.out.println("warm");
        if (kills) {
          pause.set(0);
          killLater(target, pause);
        }
      }
      if (sent >= end) {
        break;
      }
      target
          .add(ledger, payload)
          .whenComplete(
              (done, error) -> {
                all.increment();
                if (error != null) {
                  failed.increment();
                } else {
                  long now = System.nanoTime();
                  recorder.recordValue(now - sent);
                  long since = now - lastAt.getAndSet(now);
                  pause.accumulateAndGet(since, Math::max);
                }
                room.release();
              });
      ledger = ledger + 1 == ledgers ? 0 : ledger + 1;
    }
    Histogram found = recorder.getIntervalHistogram();
    long used = cpu() - cpuBefore;
    double elapsed = (System.nanoTime() - warm) / 1e9;
    // Where nothing was acknowledged any more, the pause lasts until the end.
    pause.accumulateAndGet(System.nanoTime() - lastAt.get(), Math::max);
    String text = figures(found, found.getTotalCount(), elapsed, used, failed.sum(), all.sum());
    return kills ? withPause(text, pause.get() / 1e6) : text;
  }

  /** Has the leader killed from another thread, since the window has to be kept full meanwhile. */
  private static void killLater(Target target, AtomicLong pause) {
    Thread thread =
        new Thread(
            () -> {
              try {
                int leader = target.leader();
                pause.set(0);
                ask("kill " + leader);
              } catch (Exception error) {
                error.printStackTrace();
                Runtime.getRuntime().halt(1);
              }
            });
    thread.setDaemon(true);
    thread.start();
  }

  private static String withPause(String figures, double pauseMs) {
    return String.format(Locale.ROOT, "%s, \"pause_ms\": %.2f}", figures.replace("}", ""), pauseMs);
  }

  private static void ask(String what) throws Exception {
    System.out.println(what);
    if (ANSWERS.readLine() == null) {
      throw new IllegalStateException("nobody answered: " + what);
    }
  }

  private static String takeover(Target target, int entryBytes, int inFlight, double warmUp)
      throws Exception {
    byte[] payload = new byte[entryBytes];
    Semaphore room = new Semaphore(inFlight);
    LongAdder all = new LongAdder();
    long until = System.nanoTime() + (long) (warmUp * 1e9);
    while (System.nanoTime() < until) {
      room.acquire();
      target
          .add(0, payload)
          .whenComplete(
              (done, error) -> {
                all.increment();
                room.release();
              });
    }
    System.out.println("warm");
    ask("kill " + target.leader());
    long began = System.nanoTime();
    target.takeOver();
    long took = System.nanoTime() - began;
    Histogram found = new Histogram(3);
    found.recordValue(took);
    return withPause(figures(found, 1, took / 1e9, 0, 0, all.sum()), took / 1e6);
  }

  private static String follow(Target target, int entryBytes, int rate, double warmUp, double seconds)
      throws Exception {
    Recorder recorder = new Recorder(3);
    LongAdder failed = new LongAdder();
    long began = System.nanoTime();
    long warm = began + (long) (warmUp * 1e9);
    long end = warm + (long) (seconds * 1e9);
    target.follow(
        payload -> {
          long sent = ByteBuffer.wrap(payload).getLong();
          if (sent >= warm) {
            recorder.recordValue(System.nanoTime() - sent);
          }
        });
    long count = 0;
    long measured = 0;
    long cpuBefore = 0;
    for (long due = began; due < end; due = began + (long) (count * 1e9 / rate)) {
      for (long now = System.nanoTime(); now < due; now = System.nanoTime()) {
        LockSupport.parkNanos(due - now);
      }
      if (due >= warm && measured++ == 0) {
        cpuBefore = cpu();
        System.out.println("warm");
      }
      byte[] payload = new byte[entryBytes];
      ByteBuffer.wrap(payload).putLong(System.nanoTime());
      target
          .add(0, payload)
          .whenComplete(
              (done, error) -> {
                if (error != null) {
                  failed.increment();
                }
              });
      count++;
    }
    long used = cpu() - cpuBefore;
    LockSupport.parkNanos((long) (STRAGGLERS_S * 1e9));
    Histogram found = recorder.getIntervalHistogram();
    if (found.getTotalCount() < SEEN_MIN * measured) {
      throw new IllegalStateException("saw " + found.getTotalCount() + " of " + measured + " appends");
    }
    return figures(found, found.getTotalCount(), seconds, used, failed.sum(), count);
  }

  private static String read(
      Target target,
      int entryBytes,
      int inFlight,
      long entries,
      double warmUp,
      double seconds,
      boolean isCold)
      throws Exception {
    byte[] payload = new byte[entryBytes];
    Semaphore room = new Semaphore(inFlight);
    LongAdder failed = new LongAdder();
    for (long number = 0; number < entries; number++) {
      room.acquire();
      target
          .add(0, payload)
          .whenComplete(
              (done, error) -> {
                if (error != null) {
                  failed.increment();
                }
                room.release();
              });
    }
    room.acquire(inFlight);
    if (failed.sum() > 0) {
      throw new IllegalStateException(failed.sum() + " adds failed");
    }
    target.beginReading();
    long until = System.nanoTime() + (long) (warmUp * 1e9);
    while (System.nanoTime() < until) {
      // Cold is what servers read, not the code of either side.
      checkedRead(target, isCold ? entries / WARM_PART : entries, entryBytes);
    }
    if (isCold) {
      ask("evict");
    }
    System.out.println("warm");
    // Each pass over the ledger is one value: its entries divided by its time are the rate.
    Histogram found = new Histogram(3);
    long began = System.nanoTime();
    long cpuBefore = cpu();
    long passes = 0;
    // A second pass would read what the first one has brought into memory.
    while (isCold ? passes == 0 : System.nanoTime() < began + (long) (seconds * 1e9)) {
      long before = System.nanoTime();
      checkedRead(target, entries, entryBytes);
      found.recordValue(System.nanoTime() - before);
      passes++;
    }
    double elapsed = (System.nanoTime() - began) / 1e9;
    return figures(found, passes * entries, elapsed, cpu() - cpuBefore, 0, passes * entries);
  }

  private static void checkedRead(Target target, long entries, int entryBytes) throws Exception {
    long found = target.readAll(entries);
    if (found != entries * entryBytes) {
      throw new IllegalStateException("read " + found + " bytes of " + entries * entryBytes);
    }
  }

  private static long cpu() {
    return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
        .getProcessCpuTime();
  }

  private static String figures(
      Histogram found, long done, double elapsed, long cpuNanos, long failed, long all) {
    return String.format(
        Locale.ROOT,
        "{\"adds_per_s\": %.1f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"client_us\": %.3f,"
            + " \"adds\": %d, \"failed\": %d, \"adds_with_warm_up\": %d}",
        done / elapsed,
        found.getValueAtPercentile(50) / 1e6,
        found.getValueAtPercentile(99) / 1e6,
        found.getValueAtPercentile(99.9) / 1e6,
        cpuNanos / 1e3 / Math.max(1, done),
        done,
        failed,
        all);
  }
}
